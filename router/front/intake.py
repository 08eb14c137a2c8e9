"""What every front does with a request before any worker is touched: check, tokenise, bound.

Errors name fields by the words of this module (`prompt`, `max_tokens`, ...); each front renames them to what its
own caller wrote (errors.renamed).
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from core.errors import BadRequest
from core.identity import Adapter
from core.request import SEED_BITS, GenerateRequest, Grammar, SamplingParams, StopConditions
from engine.tokenizer import Tokenizer

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
MODEL_NOT_FOUND: Final = "model_not_found"
CHAT_ROLES: Final = ("system", "developer", "user", "assistant")
# A longer text is tokenised in a thread: about 1 ms of work, which must not hold up every open stream.
INLINE_CHARACTERS: Final = 10_000
# Far over any context served, so that tokenising what will be refused anyway stays bounded.
MAX_PROMPT_CHARACTERS: Final = 1 << 20
MAX_CACHE_SALT_CHARACTERS: Final = 256
MAX_SESSION_ID_CHARACTERS: Final = 128
MAX_PROMPT_LOGPROBS: Final = 200_000  # values, the tokens' own included
MAX_STOP_CHARACTERS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model behind this router, as clients may see it. adapters: of it, by the names that clients ask for."""

    name: str
    created_s: int  # Unix seconds
    max_context_tokens: int  # prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    adapters: Mapping[str, Adapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as a front read it: types are right, values are not checked. None means "not given"."""

    prompt: Prompt
    model: str
    request_id: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    num_choices: int = 1
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    session_id: str = ""


# Raises BadRequest on `grammar` where it does not compile, Rejected where that cannot be found out now.
GrammarCheck = Callable[[Grammar, str], Awaitable[None]]  # and whose it is


class Intake:
    """Turns drafts into requests that workers can trust."""

    def __init__(self, tokenizer: Tokenizer, model: ServedModel, check_grammar: GrammarCheck) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._check_grammar = check_grammar

    async def prepare(self, draft: Draft) -> GenerateRequest:
        """The request to dispatch.

        Raises: BadRequest: naming the field; code `context_length_exceeded` where it does not fit.
            Rejected: grammars cannot be checked now.
        """
        self._check_names(draft)
        sampling = self._sampling(draft)
        self._check_stops(draft)
        token_ids = await self._token_ids(draft.prompt)
        request = GenerateRequest(
            request_id=draft.request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop=StopConditions(
                max_tokens=self._max_tokens(len(token_ids), draft.max_tokens),
                min_tokens=draft.min_tokens,
                stop_token_ids=draft.stop_token_ids,
                stop_strings=draft.stop_strings,
                ignore_eos=draft.ignore_eos,
            ),
            cache_salt=draft.cache_salt,
            tenant=draft.tenant,
            priority=draft.priority,
            num_choices=draft.num_choices,
            grammar=draft.grammar,
            prompt_logprobs=draft.prompt_logprobs,
            session_id=draft.session_id,
            adapter=self._model.adapters.get(draft.model),
        )
        self._check_scores(request)
        if draft.grammar is not None:
            await self._check_grammar(draft.grammar, draft.tenant)
        return request

    def require_served(self, field: str, name: str) -> None:
        """Raises: BadRequest: on `field`: `name` is neither the model's nor an adapter's."""
        names = (self._model.name, *self._model.adapters)
        if name not in names:
            served = f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"
            raise BadRequest(field, f"{name!r} is not served here; {served}", MODEL_NOT_FOUND)

    def _check_names(self, draft: Draft) -> None:
        self.require_served("model", draft.model)
        if not _REQUEST_ID.fullmatch(draft.request_id):
            raise BadRequest("request_id", "must be 1 to 128 letters, digits or . _ : / + = @ ~ -")
        if len(draft.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
            raise BadRequest("cache_salt", f"at most {MAX_CACHE_SALT_CHARACTERS} characters")
        _require_unicode("cache_salt", draft.cache_salt)
        if len(draft.session_id) > MAX_SESSION_ID_CHARACTERS:
            raise BadRequest("session_id", f"at most {MAX_SESSION_ID_CHARACTERS} characters")
        _require_unicode("session_id", draft.session_id)

    def _sampling(self, draft: Draft) -> SamplingParams:
        """A seed that was not given is drawn here, so that the log can name it and every worker agrees on it."""
        sampling = SamplingParams(
            temperature=1.0 if draft.temperature is None else draft.temperature,
            top_p=1.0 if draft.top_p is None else draft.top_p,
            # A larger one limits nothing; nor does vLLM's -1.
            top_k=0 if draft.top_k in (None, -1) else min(draft.top_k, self._model.vocab_size),
            seed=secrets.randbits(SEED_BITS) if draft.seed is None else draft.seed,
            min_p=draft.min_p or 0.0,
            repetition_penalty=1.0 if draft.repetition_penalty is None else draft.repetition_penalty,
            presence_penalty=draft.presence_penalty or 0.0,
            frequency_penalty=draft.frequency_penalty or 0.0,
            logit_bias=tuple(sorted((draft.logit_bias or {}).items())),
            top_logprobs=draft.top_logprobs,
        )
        for token_id, _bias in sampling.logit_bias:
            self._require_in_vocabulary(f"logit_bias.{token_id}", token_id)
        return sampling

    def _check_scores(self, request: GenerateRequest) -> None:
        """Over gRPC all of a prompt's log probabilities come in one message, which by default must stay below 4 MiB."""
        if request.prompt_logprobs is None:
            return
        num_values = request.num_prompt_tokens * (request.prompt_logprobs + 1)
        if num_values > MAX_PROMPT_LOGPROBS:
            raise BadRequest(
                "prompt_logprobs",
                f"{request.prompt_logprobs} alternatives for each of {request.num_prompt_tokens} prompt tokens make"
                f" {num_values} values; one answer takes {MAX_PROMPT_LOGPROBS}",
            )

    def _check_stops(self, draft: Draft) -> None:
        """Before `min_tokens` no stop id may be drawn, so some other token must be left: a worker without one ends."""
        if len(draft.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise BadRequest("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {len(draft.stop_token_ids)}")
        if len({*draft.stop_token_ids, *self._model.eos_token_ids}) >= self._model.vocab_size:
            raise BadRequest("stop_token_ids", "every token of the vocabulary would stop")
        for index, token_id in enumerate(draft.stop_token_ids):
            self._require_in_vocabulary(f"stop_token_ids.{index}", token_id)
        for index, text in enumerate(draft.stop_strings):
            _require_unicode(f"stop.{index}", text)
            if len(text) > MAX_STOP_CHARACTERS:
                raise BadRequest(f"stop.{index}", f"at most {MAX_STOP_CHARACTERS} characters")

    async def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not prompt:
            raise BadRequest("prompt", "must not be empty")
        if isinstance(prompt, str):
            return await self._encode_text(prompt)
        if not isinstance(prompt[0], ChatMessage):
            self._max_tokens(len(prompt), None)  # before a look at each of what may be millions
        messages = [item for item in prompt if isinstance(item, ChatMessage)]
        if messages:
            return await self._encode_chat(messages)
        token_ids = tuple(item for item in prompt if isinstance(item, int))
        for index, token_id in enumerate(token_ids):
            self._require_in_vocabulary(f"prompt.{index}", token_id)
        return token_ids

    async def _encode_text(self, text: str) -> tuple[int, ...]:
        _require_unicode("prompt", text)
        _require_bounded(len(text))
        if len(text) <= INLINE_CHARACTERS:
            return tuple(self._tokenizer.encode(text))
        return tuple(await asyncio.to_thread(self._tokenizer.encode, text))

    async def _encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        for index, message in enumerate(messages):
            if message.role not in CHAT_ROLES:
                raise BadRequest(f"prompt.{index}.role", f"must be one of {', '.join(CHAT_ROLES)}")
            _require_unicode(f"prompt.{index}.content", message.content)
        num_characters = sum(len(message.content) for message in messages)
        _require_bounded(num_characters)
        turns = [_turn(message) for message in messages]
        try:
            if num_characters <= INLINE_CHARACTERS:
                return tuple(self._tokenizer.encode_chat(turns))
            return tuple(await asyncio.to_thread(self._tokenizer.encode_chat, turns))
        except BadRequest as error:
            raise BadRequest("prompt", error.message, error.code) from error

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        """How many tokens may come out: what was asked for, or the rest of the context."""
        limit = self._model.max_context_tokens
        room = limit - num_prompt_tokens
        if room < 1:
            raise BadRequest(
                "prompt",
                f"{num_prompt_tokens} tokens leave no room for output in a context of {limit}",
                CONTEXT_LENGTH_EXCEEDED,
            )
        if asked is None:
            return room
        if asked > room:
            raise BadRequest(
                "max_tokens",
                f"{num_prompt_tokens} prompt tokens + {asked} output tokens exceed the context of {limit}",
                CONTEXT_LENGTH_EXCEEDED,
            )
        return asked

    def _require_in_vocabulary(self, field: str, token_id: int) -> None:
        if not 0 <= token_id < self._model.vocab_size:
            raise BadRequest(field, f"token id {token_id} is not in the vocabulary of {self._model.vocab_size}")


def _turn(message: ChatMessage) -> dict[str, str]:
    """A template's view of a message; `developer` is OpenAI's newer word for `system`, which templates know."""
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def _require_unicode(field: str, text: str) -> None:
    """JSON can spell half a surrogate pair; no tokenizer can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, "must be valid Unicode: it holds an unpaired surrogate") from error


def _require_bounded(num_characters: int) -> None:
    if num_characters > MAX_PROMPT_CHARACTERS:
        raise BadRequest(
            "prompt", f"{num_characters} characters exceed {MAX_PROMPT_CHARACTERS}", CONTEXT_LENGTH_EXCEEDED
        )

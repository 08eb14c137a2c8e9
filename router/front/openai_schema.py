"""The OpenAI request bodies we accept, strictly: a wrong type, an unknown field or a value we cannot honour is
refused by its name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from core.errors import BadRequest
from core.request import MAX_CHOICES, Placement
from router.front.intake import ChatMessage, Draft, Prompt
from router.front.openai_constraint import Constraints
from router.strict import Strict, Text

MAX_COMPLETION_LOGPROBS: Final = 5
MAX_TOKEN_ID_DIGITS: Final = 10


def _only(*allowed: object) -> BeforeValidator:
    """Accept a field for its harmless values; refuse what asks for something that is not there."""

    def check(value: Any) -> Any:
        # By type as well: 0 == False and 1 == True.
        if not any(type(value) is type(item) and value == item for item in allowed):
            raise PydanticCustomError("not_supported", "is not supported with this value")
        return value

    return BeforeValidator(check)


def _text_or_list(value: Any) -> str | None:
    """Which branch of a union to check, so that an error names one path."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _one_prompt(value: Any) -> Any:
    """A list holding one prompt is that prompt."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return value
    if len(value) > 1:
        raise PydanticCustomError("not_supported", "several prompts in one request are not supported")
    return value[0]


def _token_id(key: Any) -> int:
    """JSON spells a map's keys as texts."""
    if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_ID_DIGITS):
        raise PydanticCustomError("token_id", "must be a token id")
    return int(key)


TokenId = Annotated[int, BeforeValidator(_token_id)]
Absent = Annotated[Any, _only(None)]
AbsentOrFalse = Annotated[Any, _only(None, False)]
AbsentOrEmptyList = Annotated[Any, _only(None, [])]
NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


class TextPart(Strict):
    """One part of a message's content; text is the only kind there is yet."""

    type: Annotated[Any, _only("text")]
    text: Text


class Message(Strict):
    """One turn. The fields that only OpenAI's own answers carry are accepted empty, so that an answer can be
    sent back as it came."""

    role: Text
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
        Discriminator(_text_or_list),
    ]
    refusal: Absent = None
    annotations: AbsentOrEmptyList = None
    audio: Absent = None
    function_call: Absent = None
    tool_calls: AbsentOrEmptyList = None

    def chat_message(self) -> ChatMessage:
        """The message with its parts joined."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return ChatMessage(self.role, text)


class StreamOptions(Strict):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TandemOptions(Strict):
    """Our own extension: where the prompt is prefilled."""

    prefill: Literal["auto", "remote", "local"] = "auto"


class Body(Constraints):
    """What both endpoints share."""

    model: Text
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    stop: (
        Annotated[
            Annotated[Text, Tag("<text>")] | Annotated[list[Text], Tag("<list>")],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Text | None = None
    priority: int | None = None
    user: Text | None = None
    metadata: dict[str, Text] | None = None
    store: AbsentOrFalse = None
    n: NumChoices | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    tandem: TandemOptions | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def usage_chunk(self) -> bool:
        """A last chunk with usage and no choices."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_each_chunk(self) -> bool:
        return self.usage_chunk and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_returned(self) -> int:
        """Choices that the answer has."""
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """Choices that are generated, of which the best are returned."""
        return self.num_returned

    @property
    def placement(self) -> Placement:
        return Placement(self.tandem.prefill) if self.tandem else Placement.AUTO

    def prompt_value(self) -> Prompt:
        """The prompt in the form that the intake takes."""
        raise NotImplementedError

    def max_tokens_asked(self) -> int | None:
        """How many tokens the caller allows, under whichever name."""
        return self.max_tokens

    def top_logprobs_asked(self) -> int | None:
        """How many alternatives to report with each log probability; None where none were asked for."""
        raise NotImplementedError

    def prompt_logprobs_asked(self) -> int | None:
        """How many alternatives to report with each prompt token; None where none were asked for."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """The answer's text begins with the prompt."""
        return False

    def field_names(self) -> dict[str, str]:
        """How this caller spelled the intake's fields, where it differs."""
        field = self.grammar_field()
        return {} if field is None else {"grammar": field}

    def _top_logprobs(self) -> int | None:
        """As asked, or what ranking needs."""
        asked = self.top_logprobs_asked()
        return 0 if asked is None and self.num_generated > self.num_returned else asked

    def draft(self, request_id: str) -> Draft:
        """The request as the intake takes it."""
        return Draft(
            prompt=self.prompt_value(),
            model=self.model,
            request_id=request_id,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            top_logprobs=self._top_logprobs(),
            max_tokens=self.max_tokens_asked(),
            min_tokens=self.min_tokens or 0,
            stop_strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            num_choices=self.num_generated,
            grammar=self.grammar_asked(),
            prompt_logprobs=self.prompt_logprobs_asked(),
        )

    def require_consistent(self) -> None:
        """Refuse fields that contradict each other."""
        if self.stream_options is not None and not self.streamed:
            raise BadRequest("stream_options", "is allowed only with stream: true")
        if self.prompt_logprobs is not None and self.streamed:
            raise BadRequest("prompt_logprobs", "is not allowed with stream: true")
        self.grammar_field()


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: AbsentOrEmptyList = None
    tool_choice: Annotated[Any, _only(None, "none")] = None
    parallel_tool_calls: Annotated[Any, _only(None, True, False)] = None  # of no tools

    def prompt_value(self) -> Prompt:
        return tuple(message.chat_message() for message in self.messages)

    def max_tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def top_logprobs_asked(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def field_names(self) -> dict[str, str]:
        names = {**super().field_names(), "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def require_consistent(self) -> None:
        super().require_consistent()
        if self.max_tokens is not None and self.max_tokens_asked() != self.max_tokens:
            raise BadRequest("max_completion_tokens", "differs from max_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs", "is allowed only with logprobs: true")


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[int], Tag("<list>")],
        Discriminator(_text_or_list),
        BeforeValidator(_one_prompt),
    ]
    best_of: NumChoices | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    suffix: Annotated[Any, _only(None, "")] = None

    def prompt_value(self) -> Prompt:
        return self.prompt if isinstance(self.prompt, str) else tuple(self.prompt)

    @property
    def num_generated(self) -> int:
        return self.best_of or self.num_returned

    def top_logprobs_asked(self) -> int | None:
        return self.logprobs

    def prompt_logprobs_asked(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((count for count in (self.prompt_logprobs, echoed) if count is not None), default=None)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def field_names(self) -> dict[str, str]:
        names = super().field_names()
        return names if self.prompt_logprobs is not None else {**names, "prompt_logprobs": "logprobs"}

    def require_consistent(self) -> None:
        super().require_consistent()
        if self.echo and self.streamed:
            raise BadRequest("echo", "is not allowed with stream: true")
        if self.num_generated < self.num_returned:
            raise BadRequest("best_of", f"must be at least n = {self.num_returned}, got {self.num_generated}")
        if self.streamed and self.num_generated > self.num_returned:
            raise BadRequest("best_of", "above n is allowed only without stream: which are best is known at the end")

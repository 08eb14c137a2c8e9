"""The response objects of the OpenAI API, byte for byte as its clients expect them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from core.request import FinishReason, GenerateRequest, PromptLogprobs, TokenLogprobs
from router.front.generation import TextDelta
from router.front.intake import ServedModel
from router.front.openai_schema import Body
from router.front.spelling import SpelledPosition, SpelledToken, Speller
from router.front.usage import Usage
from router.front.whole import WholeOutput

DONE_FRAME: Final = b"data: [DONE]\n\n"
Logprobs = dict[str, list[Any] | None]  # a choice's `logprobs`


def frame(value: dict[str, Any]) -> bytes:
    """One SSE event. ASCII only, so that no client can take a Unicode line separator for an event's end."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


class Shape(Protocol):
    """How one endpoint spells the same answer."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    prompt_logprobs_by_choice: bool  # else beside the choices, as vLLM has them

    def opening(self) -> dict[str, Any] | None:
        """What opens each choice of a stream beside its index, if this endpoint has such a thing."""
        ...

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None, logprobs: Logprobs | None
    ) -> dict[str, Any]:
        """The choice of one chunk."""
        ...

    def whole(self, index: int, text: str, finish_reason: FinishReason, logprobs: Logprobs | None) -> dict[str, Any]:
        """A choice of an answer in one piece."""
        ...

    def logprobs(self, positions: Sequence[SpelledPosition]) -> Logprobs:
        """The log probabilities of some output positions."""
        ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    prompt_logprobs_by_choice = False

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None, logprobs: Logprobs | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def whole(self, index: int, text: str, finish_reason: FinishReason, logprobs: Logprobs | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs(self, positions: Sequence[SpelledPosition]) -> Logprobs:
        content = [
            {**_chat_token(position.drawn), "top_logprobs": [_chat_token(token) for token in position.top]}
            for position in positions
        ]
        return {"content": content, "refusal": None}


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"
    prompt_logprobs_by_choice = True

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(
        self, index: int, text: str, finish_reason: FinishReason | None, logprobs: Logprobs | None
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def whole(self, index: int, text: str, finish_reason: FinishReason, logprobs: Logprobs | None) -> dict[str, Any]:
        return self.piece(index, text, finish_reason, logprobs)

    def logprobs(self, positions: Sequence[SpelledPosition]) -> Logprobs:
        return {
            "tokens": [_completion_token(position.drawn) for position in positions],
            "token_logprobs": [position.drawn.logprob for position in positions],
            "top_logprobs": [_alternatives(position) for position in positions],
            "text_offset": [position.text_offset for position in positions],
        }


class Reply:
    """To one request: the same head on every object of it."""

    def __init__(
        self,
        shape: Shape,
        model: ServedModel,
        body: Body,
        new_speller: Callable[[], Speller],
        request: GenerateRequest,
        created_s: int,
    ) -> None:
        self._shape = shape
        self._body = body
        self._prompt_token_ids = request.prompt_token_ids
        self._spellers = [new_speller() for _ in range(body.num_returned)]
        self._head = {
            "id": shape.id_prefix + request.request_id,
            "created": created_s,
            "model": model.name if request.adapter is None else request.adapter.name,
            "system_fingerprint": "fp_" + model.weights_digest[:10],
        }

    def opening_frames(self, usage: Usage) -> bytes:
        """What a stream starts with, before any text."""
        opening = self._shape.opening()
        if opening is None:
            return b""
        return b"".join(self._chunk({"index": index, **opening}, usage) for index in range(self._body.num_returned))

    def delta_frames(self, delta: TextDelta) -> bytes:
        """The chunks for one delta: text, then the finish by itself, as OpenAI sends them."""
        index = delta.choice
        piece = self._shape.piece(index, delta.text, None, self._logprobs(index, delta.token_ids, delta.logprobs))
        has_news = delta.text or delta.logprobs or self._body.return_token_ids
        frames = self._chunk(self._with_token_ids(piece, delta.token_ids), delta.usage) if has_news else b""
        if delta.finish_reason is not None:
            frames += self._chunk(self._shape.piece(index, "", delta.finish_reason, None), delta.usage)
        return frames

    def usage_frames(self, usage: Usage) -> bytes:
        """The chunk without choices, when it was asked for."""
        if not self._body.usage_chunk:
            return b""
        return frame({**self._chunk_head(), "choices": [], "usage": usage_object(usage)})

    def whole(
        self, outputs: Sequence[WholeOutput], usage: Usage, prompt_logprobs: PromptLogprobs | None = None
    ) -> dict[str, Any]:
        """The answer in one piece, a choice for each output."""
        choices = [self._whole_choice(index, output, prompt_logprobs) for index, output in enumerate(outputs)]
        answer = {
            "object": self._shape.whole_object,
            **self._head,
            "choices": choices,
            "usage": usage_object(usage),
        }
        if self._body.prompt_logprobs is not None and prompt_logprobs is not None:
            scores = self._spellers[0].prompt_objects(
                self._prompt_token_ids, prompt_logprobs, self._body.prompt_logprobs
            )
            for holder in choices if self._shape.prompt_logprobs_by_choice else [answer]:
                holder["prompt_logprobs"] = scores
        return answer

    def whole_json(self, outputs: Sequence[WholeOutput], usage: Usage, prompt_logprobs: PromptLogprobs) -> str:
        """`whole` as text. Touches nothing that another thread uses."""
        return json.dumps(self.whole(outputs, usage, prompt_logprobs))

    def _whole_choice(self, index: int, output: WholeOutput, prompt_logprobs: PromptLogprobs | None) -> dict[str, Any]:
        assert output.finish_reason is not None, "an answer is closed when every choice has ended"
        text, num_top, speller = output.text, self._body.top_logprobs_asked(), self._spellers[index]
        positions: list[SpelledPosition] = []
        if self._body.echoes:
            text = speller.text_of(self._prompt_token_ids) + text
            if num_top is not None and prompt_logprobs is not None:
                positions += speller.push_prompt(self._prompt_token_ids, prompt_logprobs, num_top)
        if num_top is not None and output.logprobs:
            positions += speller.push(output.token_ids, output.logprobs)
        logprobs = self._shape.logprobs(positions) if positions else None
        choice = self._shape.whole(index, text, output.finish_reason, logprobs)
        return self._with_token_ids(choice, output.token_ids)

    def _chunk(self, choice: dict[str, Any], usage: Usage) -> bytes:
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._body.usage_chunk:
            chunk["usage"] = usage_object(usage) if self._body.usage_in_each_chunk else None
        return frame(chunk)

    def _with_token_ids(self, choice: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        """vLLM's extension of a choice, when the caller asked for it."""
        return {**choice, "token_ids": list(token_ids)} if self._body.return_token_ids else choice

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Logprobs | None:
        return self._shape.logprobs(self._spellers[index].push(token_ids, logprobs)) if logprobs else None

    def _chunk_head(self) -> dict[str, Any]:
        return {"object": self._shape.chunk_object, **self._head}


def _chat_token(token: SpelledToken) -> dict[str, Any]:
    return {"token": _escaped(token.raw), "logprob": token.logprob, "bytes": list(token.raw)}


def _completion_token(token: SpelledToken) -> str:
    """As OpenAI marks tokens that are not whole characters where there is no `bytes` beside them."""
    text = _escaped(token.raw)
    return text if text.encode() == token.raw else f"bytes:{text}"


def _alternatives(position: SpelledPosition) -> dict[str, float] | None:
    """The best tokens, best first, and the drawn one, which is always there. Where two are spelled alike the better
    one stays."""
    spelled: dict[str, float] = {}
    for token in (*position.top, position.drawn):
        if token.logprob is None:
            return None
        spelled.setdefault(_completion_token(token), token.logprob)
    return spelled


def _escaped(raw: bytes) -> str:
    r"""Text with bytes that are no UTF-8 written as \x and two digits, as OpenAI does."""
    return raw.decode("utf-8", errors="backslashreplace")


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with our own counts under `tandem`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "tandem": {
            "computed_tokens": usage.computed_tokens,
            "fetched_tokens": usage.fetched_tokens,
            "kv_blocks_moved": usage.kv_blocks_moved,
            "kv_bytes_moved": usage.kv_bytes_moved,
        },
    }


def model_objects(model: ServedModel) -> dict[str, dict[str, Any]]:
    """The entries of /v1/models by id: the model, then its adapters; `max_model_len` and `parent` are vLLM's."""
    shared = {
        "object": "model",
        "created": model.created_s,
        "owned_by": "tandem",
        "max_model_len": model.max_context_tokens,
    }
    adapters = {name: {"id": name, **shared, "parent": model.name} for name in model.adapters}
    return {model.name: {"id": model.name, **shared}, **adapters}

"""The response objects of the OpenAI API, byte for byte as its clients expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from core.request import FinishReason
from router.front.generation import TextDelta
from router.front.intake import ServedModel
from router.front.openai_schema import Body
from router.front.usage import Usage

DONE_FRAME: Final = b"data: [DONE]\n\n"


def frame(value: dict[str, Any]) -> bytes:
    """One SSE event. ASCII only, so that no client can take a Unicode line separator for an event's end."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


class Shape(Protocol):
    """How one endpoint spells the same answer."""

    id_prefix: str
    chunk_object: str
    whole_object: str

    def opening(self) -> dict[str, Any] | None:
        """The choice that opens a stream, if this endpoint has one."""
        ...

    def piece(self, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        """The choice of one chunk. An empty text without a finish reason never gets here."""
        ...

    def whole(self, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        """The choice of an answer in one piece."""
        ...


class ChatShape:
    """/v1/chat/completions."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {
            "index": 0,
            "delta": {"content": text} if text else {},
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def whole(self, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}


class CompletionShape:
    """/v1/completions."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str, finish_reason: FinishReason | None) -> dict[str, Any]:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}

    def whole(self, text: str, finish_reason: FinishReason) -> dict[str, Any]:
        return self.piece(text, finish_reason)


class Answer:
    """One request's answer: the same head on every object of it."""

    def __init__(self, shape: Shape, model: ServedModel, body: Body, request_id: str, created_s: int) -> None:
        self._shape = shape
        self._body = body
        self._head = {
            "id": shape.id_prefix + request_id,
            "created": created_s,
            "model": model.name,
            "system_fingerprint": "fp_" + model.weights_digest[:10],
        }

    def opening_frames(self, usage: Usage) -> bytes:
        """What a stream starts with, before any text."""
        choice = self._shape.opening()
        return b"" if choice is None else self._chunk(choice, usage)

    def delta_frames(self, delta: TextDelta) -> bytes:
        """The chunks for one delta: text, then the finish by itself, as OpenAI sends them."""
        piece = self._with_token_ids(self._shape.piece(delta.text, None), delta.token_ids)
        frames = self._chunk(piece, delta.usage) if delta.text or self._body.return_token_ids else b""
        if delta.finish_reason is not None:
            frames += self._chunk(self._shape.piece("", delta.finish_reason), delta.usage)
        return frames

    def usage_frames(self, usage: Usage) -> bytes:
        """The chunk without choices, when it was asked for."""
        if not self._body.usage_chunk:
            return b""
        return frame({**self._chunk_head(), "choices": [], "usage": usage_object(usage)})

    def whole(self, text: str, token_ids: Sequence[int], last: TextDelta) -> dict[str, Any]:
        """The answer in one piece."""
        assert last.finish_reason is not None, "only the last delta closes an answer"
        choice = self._shape.whole(text, last.finish_reason)
        return {
            "object": self._shape.whole_object,
            **self._head,
            "choices": [self._with_token_ids(choice, token_ids)],
            "usage": usage_object(last.usage),
        }

    def _chunk(self, choice: dict[str, Any], usage: Usage) -> bytes:
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._body.usage_chunk:
            chunk["usage"] = usage_object(usage) if self._body.usage_in_each_chunk else None
        return frame(chunk)

    def _with_token_ids(self, choice: dict[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
        """vLLM's extension of a choice, when the caller asked for it."""
        return {**choice, "token_ids": list(token_ids)} if self._body.return_token_ids else choice

    def _chunk_head(self) -> dict[str, Any]:
        return {"object": self._shape.chunk_object, **self._head}


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


def model_object(model: ServedModel) -> dict[str, Any]:
    """One entry of /v1/models; `max_model_len` is what vLLM clients look for."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "tandem",
        "max_model_len": model.max_context_tokens,
    }

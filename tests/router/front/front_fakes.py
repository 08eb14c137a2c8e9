"""A scripted dispatcher and a tokenizer of bytes: what the fronts need, with nothing behind it."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from core.errors import BadRequest
from core.identity import Adapter
from core.request import (
    FinishReason,
    GenerateRequest,
    Grammar,
    Placement,
    PromptLogprobs,
    TokenDelta,
    TokenLogprobs,
    WorkUsage,
)
from router.front.intake import ServedModel

END = 256
MODEL = ServedModel(
    name="tiny",
    created_s=1_700_000_000,
    max_context_tokens=64,
    vocab_size=257,
    eos_token_ids=(END,),
    weights_digest="0123456789abcdef",
    adapters={"tiny-poet": Adapter("tiny-poet", "d1")},
)
CREATED_S = 1_700_000_123.9

Script = Callable[[GenerateRequest], AsyncGenerator[TokenDelta, None]]


async def check_grammar(grammar: Grammar, _tenant: str) -> None:
    """Takes every grammar without the word "wrong" in it."""
    if "wrong" in grammar.source:
        raise BadRequest("grammar", "does not compile")


class ByteTokenizer:
    """One token a byte; 256 is the end."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] == "assistant":
            raise BadRequest("messages", "refused by the model's chat template: must not begin with the assistant")
        return self.encode("".join(f"{message['role'][0]}:{message['content']}\n" for message in messages))

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def spelling(self, token_id: int) -> bytes:
        return b"<end>" if token_id == END else bytes([token_id])


class ByteDecoder:
    """Holds back incomplete UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < END))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ScriptedDispatcher:
    """Plays `script`, and remembers what it was asked and whether it was closed."""

    def __init__(self) -> None:
        self.script: Script = says("ok")
        self.requests: list[GenerateRequest] = []
        self.placements: list[Placement] = []
        self.max_ttfts_s: list[float | None] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, placement: Placement, max_ttft_s: float | None
    ) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.placements.append(placement)
        self.max_ttfts_s.append(max_ttft_s)
        self.started.set()
        try:
            async for delta in self.script(request):
                yield delta
        finally:
            self.closed.set()


def says(
    text: str | bytes,
    finish_reason: FinishReason = FinishReason.STOP,
    matched_stop: str | None = None,
    work: Sequence[WorkUsage] = (),
) -> Script:
    """One token a delta; a STOP without a stop string ends with the end token, as a model does."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        token_ids = list(text.encode() if isinstance(text, str) else text)
        if finish_reason is FinishReason.STOP and matched_stop is None:
            token_ids.append(END)
        for position, token_id in enumerate(token_ids):
            last = position == len(token_ids) - 1
            yield TokenDelta(
                request_id=request.request_id,
                position=position,
                token_ids=(token_id,),
                finish_reason=finish_reason if last else None,
                matched_stop=matched_stop if last else None,
                usage=work[position] if position < len(work) else None,
            )

    return script


def says_scored(text: str, tokens_a_delta: int = 1) -> Script:
    """Ends with the end token. Position i has log probability -i - 0.5, and before it as many alternatives as were
    asked for, the bytes 0xF0 and up, with -0.25 each; nothing when none was asked for."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        token_ids = [*text.encode(), END]
        num_top = request.sampling.top_logprobs
        top = tuple((0xF0 + index, -0.25) for index in range(num_top or 0))
        logprobs = [TokenLogprobs(-position - 0.5, top) for position in range(len(token_ids)) if num_top is not None]
        for start in range(0, len(token_ids), tokens_a_delta):
            end = start + tokens_a_delta
            yield TokenDelta(
                request_id=request.request_id,
                position=start,
                token_ids=tuple(token_ids[start:end]),
                finish_reason=FinishReason.STOP if end >= len(token_ids) else None,
                logprobs=tuple(logprobs[start:end]),
                prompt_logprobs=scores_of(request) if start == 0 else None,
            )

    return script


def scores_of(request: GenerateRequest) -> PromptLogprobs | None:
    """Prompt token i has log probability -i and rank i + 1; its alternatives are the bytes 0xE0 and up, with -0.125."""
    num_top = request.prompt_logprobs
    if num_top is None:
        return None
    positions = range(1, request.num_prompt_tokens)
    return PromptLogprobs(
        num_top,
        tuple(-float(position) for position in positions),
        tuple(position + 1 for position in positions),
        tuple(0xE0 + index for _position in positions for index in range(num_top)),
        (-0.125,) * (len(positions) * num_top),
    )


def says_choices(
    texts: Sequence[str], scores: Sequence[float] = (), work: WorkUsage | None = None, all_at_once: bool = False
) -> Script:
    """A text for each choice, ended by the end token, their tokens in turn; choice i has log probability scores[i] at
    each position. all_at_once: one choice after the other, each in one delta."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        assert request.num_choices == len(texts)
        outputs = [[*text.encode(), END] for text in texts]
        width = max(map(len, outputs)) if all_at_once else 1
        for position in range(0, max(map(len, outputs)), width):
            for choice, output in enumerate(outputs):
                token_ids = tuple(output[position : position + width])
                if not token_ids:
                    continue
                scored = request.sampling.top_logprobs is not None
                yield TokenDelta(
                    request_id=request.request_id,
                    position=position,
                    token_ids=token_ids,
                    finish_reason=FinishReason.STOP if token_ids[-1] == END else None,
                    usage=work if position == choice == 0 else None,
                    logprobs=tuple(TokenLogprobs(scores[choice]) for _ in token_ids) if scored else (),
                    choice=choice,
                )

    return script


def says_then_raises(text: str, error: Exception) -> Script:
    """Fails after the tokens of `text`."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for position, token_id in enumerate(text.encode()):
            yield TokenDelta(request.request_id, position, (token_id,))
        raise error

    return script


def says_then_hangs(text: str) -> Script:
    """Never ends by itself."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for position, token_id in enumerate(text.encode()):
            yield TokenDelta(request.request_id, position, (token_id,))
        await asyncio.Event().wait()

    return script


def floods() -> Script:
    """Sends faster than any client reads, for ever."""

    async def script(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        position = 0
        while True:
            yield TokenDelta(request.request_id, position, (120,) * 4096)
            position += 4096

    return script

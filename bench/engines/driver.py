"""What every engine's driver does: it answers commands on its standard input, one JSON object a line.

An engine gives `Engine`, three calls; the measurements are here, the same for all. Standard library only, as the
python that runs it is the engine's own. Commands, and what is answered:

1. {"do": "load", ...fields of Settings} -> {"version"}; ends with a warm-up of 512 tokens.
2. {"do": "prefill", "tokens", "seed"} -> {"took"}: a prompt on an idle engine, until its first token is out.
3. {"do": "fill", "batch", "context", "seed"} -> {"contexts"}: `batch` sequences that decode, all near `context` tokens.
4. {"do": "decode", "steps"} -> {"took", "tokens"}: steps of what was filled.
5. {"do": "mixed", "tokens", "lead", "window", "seed"} -> {"ttft", "gaps"}: what was filled decodes, and after `lead`
   tokens of each a prompt arrives; `gaps` are those between the `window` tokens of each stream around that.

A time is [seconds on the wall, seconds of this process on the core]. The end of the input ends the driver.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

WARM_UP_TOKENS: Final = 512
FILL_ATTEMPTS: Final = 4
MOST_SPREAD: Final = 40  # tokens between the contexts of a batch
LEAST_PROMPT: Final = 16
STREAM_MAX_TOKENS: Final = 2000  # never reached
FIRST_PLAIN_ID: Final = 100  # below lie special tokens

Took = tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """token_budget: most tokens in one step, 0 for the engine's own default. kv_tokens: size of the KV cache.

    max_decode_slowdown: Tandem's; the others have nothing like it.
    """

    model: str
    dtype: str
    token_budget: int
    kv_tokens: int
    max_context: int
    max_sequences: int
    max_decode_slowdown: float
    temperature: float
    vocab_size: int


class Engine(Protocol):
    """An engine in this process, scheduler and sampler included."""

    version: str

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request that ends after `max_tokens` and at no EOS."""

    def step(self) -> list[str]:
        """Compute one step. Returns: the requests that got a token."""

    def clear(self) -> None:
        """Forget all requests."""


class Stopwatch:
    def __init__(self) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def took(self) -> Took:
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


class Measurements:
    """The commands on one engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._streams: list[str] = []
        self._growth: dict[int, list[int]] = {}  # by batch: of each stream while it was filled
        self._stagger = self._warm_up()

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        self._clear()
        prompt = self._prompt(tokens, seed)
        watch = Stopwatch()
        self._engine.add("prompt", prompt, 1)
        self._step_until("prompt")
        return {"took": watch.took()}

    def fill(self, batch: int, context: int, seed: int) -> dict[str, Any]:
        """Begin streams that all come to about `context` tokens: the first ones grow while the others begin."""
        growth = self._growth.get(batch, [(batch - 1 - index) * self._stagger for index in range(batch)])
        for attempt in range(FILL_ATTEMPTS):
            lengths = [max(LEAST_PROMPT, context - grown) for grown in growth]
            contexts = self._begin_streams(lengths, f"{seed}.{attempt}")
            if max(contexts) - min(contexts) <= MOST_SPREAD:
                break
            growth = [reached - length for reached, length in zip(contexts, lengths, strict=True)]
        self._growth[batch] = growth
        return {"contexts": [min(contexts), max(contexts)]}

    def _begin_streams(self, lengths: list[int], seed: str) -> list[int]:
        """Returns: the tokens of each when the last one has its first."""
        self._clear()
        contexts = list(lengths)
        self._streams = [f"stream {index}" for index in range(len(lengths))]
        for index, name in enumerate(self._streams):
            self._engine.add(name, self._prompt(lengths[index], f"{seed}.{index}"), STREAM_MAX_TOKENS)
            if self._stagger:
                for grown in self._step_until(name):
                    contexts[self._streams.index(grown)] += 1
        if not self._stagger:
            self._step_until(self._streams[-1])
        return contexts

    def decode(self, steps: int) -> dict[str, Any]:
        watch = Stopwatch()
        tokens = sum(len(self._engine.step()) for _ in range(steps))
        return {"took": watch.took(), "tokens": tokens}

    def mixed(self, tokens: int, lead: int, window: int, seed: int) -> dict[str, Any]:
        prompt = self._prompt(tokens, seed)
        watch = Stopwatch()
        last = dict.fromkeys(self._streams, watch.took())
        gaps: dict[str, list[Took]] = {name: [] for name in self._streams}
        arrived: Took | None = None
        ttft: Took | None = None
        while ttft is None or min(map(len, gaps.values())) < window:
            if arrived is None and min(map(len, gaps.values())) >= lead:
                arrived = watch.took()
                self._engine.add("prompt", prompt, 1)
            grown = self._engine.step()
            now = watch.took()
            for name in grown:
                if name == "prompt" and arrived is not None:
                    ttft = _between(arrived, now)
                    continue
                gaps[name].append(_between(last[name], now))
                last[name] = now
        return {"ttft": ttft, "gaps": [gap for values in gaps.values() for gap in values[:window]]}

    def _warm_up(self) -> int:
        """Returns: how many tokens a decoding sequence gets while a prompt is computed beside it."""
        self._streams = ["warm"]
        self._engine.add("warm", self._prompt(WARM_UP_TOKENS, 0), STREAM_MAX_TOKENS)
        self._step_until("warm")
        self._engine.step()
        self._engine.add("beside", self._prompt(WARM_UP_TOKENS, 1), 1)
        return self._step_until("beside").count("warm")

    def _step_until(self, name: str) -> list[str]:
        """Step until `name` has its first token. Returns: what got tokens, by step."""
        grown: list[str] = []
        while name not in grown:
            grown += self._engine.step()
        return grown

    def _clear(self) -> None:
        self._streams = []
        self._engine.clear()

    def _prompt(self, tokens: int, seed: int | str) -> list[int]:
        """Random ids, so that no prefix is met twice."""
        draw = random.Random(f"{seed} {tokens}")
        return [draw.randrange(FIRST_PLAIN_ID, self._settings.vocab_size) for _ in range(tokens)]


def _between(start: Took, end: Took) -> Took:
    return end[0] - start[0], end[1] - start[1]


def serve(load: Callable[[Settings], Engine]) -> None:
    """Answer commands until the input ends. What the engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    measurements: Measurements | None = None
    for line in sys.stdin:
        command = json.loads(line)
        action = command.pop("do")
        if action == "load":
            settings = Settings(**command)
            engine = load(settings)
            measurements = Measurements(engine, settings)
            answer = {"version": engine.version}
        else:
            answer = getattr(measurements, action)(**command)
        print(json.dumps(answer), file=answers, flush=True)

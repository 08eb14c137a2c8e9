"""Real router processes before stub workers that answer at once, all in one run, in turn.

requests: one request at a time of 100, 2,000 and 100,000 prompt tokens, new text each time, one token out. TTFT is from
before the request is sent to the first token's bytes; what it has above the floor's is what the router adds. CPU is
that of the router's processes for each request. Medians of rounds; the routers take turns in each.

tokens: 64 streams, each as fast as the router takes tokens; the router has one core, workers and client have the other.
Tokens per second of the clock count what others do on the machine; tokens per second of the router's CPU do not.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import grpc
import tokenizers

from bench.router.client import Client, Send
from bench.router.gateways import Gateway, floor, long_context_folder, other_cores, smg, tandem
from bench.servers import ServerFailed
from cluster.folders import default_model_folder

PROMPTS: Final = {100: 100, 2_000: 50, 100_000: 2}  # tokens: requests of a round
NUM_WORKERS: Final = 2
NUM_WORDS: Final = 200
WARM_REQUESTS: Final = 50  # a second or two, in which what starts beside a router has started
READY_LIMIT_S: Final = 60.0
REQUEST_LIMIT_S: Final = 300.0

Words = dict[str, int]  # each with a space before it, and one token whatever is beside it


@dataclass
class Case:
    """One way to a router, and what the rounds gave."""

    name: str
    gateway: Gateway
    send: Send
    ttfts_s: list[float] = field(default_factory=list)
    cpus_s: list[float] = field(default_factory=list)  # for each request
    rates: list[float] = field(default_factory=list)  # tokens per second
    cpu_rates: list[float] = field(default_factory=list)  # tokens per second of the router's CPU


async def requests(smg_python: Path | None, rounds: int) -> None:
    print("| prompt, tokens | router | TTFT p50, ms | added, ms | CPU for each request, ms |")
    print("| --- | --- | --- | --- | --- |")
    for num_tokens, num_requests in PROMPTS.items():
        async with _cases(smg_python, with_floor=True) as (cases, words):
            for _ in range(rounds):
                for case in cases:
                    await one_by_one(case, [prompt_of(words, num_tokens) for _ in range(num_requests)])
        least_s = statistics.median(cases[0].ttfts_s)
        for case in cases:
            ttft_s, cpu_s = statistics.median(case.ttfts_s), statistics.median(case.cpus_s)
            row = f"| {num_tokens:,} | {case.name} | {1e3 * ttft_s:.2f} | {1e3 * (ttft_s - least_s):.2f} |"
            print(f"{row} {1e3 * cpu_s:.2f} |", flush=True)


async def tokens(smg_python: Path | None, rounds: int, num_streams: int, stream_tokens: int) -> None:
    print("| router | tokens/s | tokens/s of its CPU |\n| --- | --- | --- |")
    async with _cases(smg_python, with_floor=False) as (cases, words):
        for _ in range(rounds):
            for case in cases:
                await together(case, [prompt_of(words, 100) for _ in range(num_streams)], stream_tokens)
    for case in cases:
        print(f"| {case.name} | {statistics.median(case.rates):,.0f} | {statistics.median(case.cpu_rates):,.0f} |")


@asynccontextmanager
async def _cases(smg_python: Path | None, with_floor: bool) -> AsyncIterator[tuple[list[Case], Words]]:
    """The routers, started and warm, and what prompts are made of."""
    os.sched_setaffinity(0, other_cores())
    with ExitStack() as stack:
        folder = stack.enter_context(long_context_folder(default_model_folder()))
        words = words_of(folder)
        token_ids = list(words.values())
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))
        client, cases = Client(session), []
        if with_floor:
            gateway = stack.enter_context(floor())
            cases.append(Case(gateway.name, gateway, client.http))
        gateway = stack.enter_context(tandem(folder, token_ids, NUM_WORKERS))
        cases += [Case("tandem, HTTP", gateway, client.http), Case("tandem, gRPC", gateway, client.grpc)]
        if smg_python is not None:
            gateway = stack.enter_context(smg(smg_python, folder, token_ids, NUM_WORKERS))
            cases.append(Case("smg, HTTP", gateway, client.http))
        try:
            for case in cases:
                await warm_up(case)
            yield cases, words
        finally:
            await client.close()
            await session.close()


async def warm_up(case: Case) -> None:
    deadline_s = time.monotonic() + READY_LIMIT_S
    while True:
        try:
            for _ in range(WARM_REQUESTS):
                await case.send(case.gateway, " a", 2)
            return
        except (ServerFailed, aiohttp.ClientError, grpc.aio.AioRpcError):
            if time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.2)


async def _at_once() -> None:
    pass


async def one_by_one(case: Case, prompts: list[str], settle: Callable[[], Awaitable[None]] = _at_once) -> None:
    """settle: waits for what the router still does for them."""
    before_s = case.gateway.cpu_s()
    for prompt in prompts:
        async with asyncio.timeout(REQUEST_LIMIT_S):
            ttft_s, num_tokens = await case.send(case.gateway, prompt, 1)
        if num_tokens != 1:
            raise ServerFailed(f"{case.name}: {num_tokens} tokens for 1")
        case.ttfts_s.append(ttft_s)
    await settle()
    case.cpus_s.append((case.gateway.cpu_s() - before_s) / len(prompts))


async def together(
    case: Case, prompts: list[str], stream_tokens: int, settle: Callable[[], Awaitable[None]] = _at_once
) -> None:
    """settle: as one_by_one."""
    before_s, begun_s = case.gateway.cpu_s(), time.perf_counter()
    async with asyncio.timeout(REQUEST_LIMIT_S):
        answers = await asyncio.gather(*(case.send(case.gateway, prompt, stream_tokens) for prompt in prompts))
    taken_s = time.perf_counter() - begun_s
    await settle()
    cpu_s = case.gateway.cpu_s() - before_s
    if any(num_tokens != stream_tokens for _, num_tokens in answers):
        raise ServerFailed(f"{case.name}: {[num for _, num in answers]} tokens for {stream_tokens} each")
    case.rates.append(len(prompts) * stream_tokens / taken_s)
    case.cpu_rates.append(len(prompts) * stream_tokens / cpu_s)


def words_of(folder: Path) -> Words:
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=False)
    words = {f" {token[1:]}": token_id for token, token_id in vocabulary.items() if _is_word(token)}
    return dict(sorted(words.items())[:NUM_WORDS])


def _is_word(token: str) -> bool:
    """A space, as byte-level BPE spells it, and some letters."""
    return token[0] == "\u0120" and token[1:].isascii() and token[1:].islower() and token[1:].isalpha()


def prompt_of(words: Words, num_tokens: int) -> str:
    return "".join(random.choices(list(words), k=num_tokens))

"""What traces cost a router: three of them in one run, in turn, that trace nothing, 1 % and all of their requests.

A collector on the other core takes all spans. CPU is that of the router's processes for each request, the sending of
its spans included: it sends within SEND_DELAY_MS, and each turn ends with a wait for that.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import aiohttp

from bench.router.client import Client
from bench.router.gateways import long_context_folder, other_cores, tandem
from bench.router.streams import NUM_WORKERS, Case, one_by_one, prompt_of, together, warm_up, words_of
from bench.servers import ServerFailed
from cluster.folders import default_model_folder

RATIOS: Final = (0.0, 0.01, 1.0)
NUM_REQUESTS: Final = 300  # of a turn
PROMPT_TOKENS: Final = 100
SEND_DELAY_MS: Final = 200
STEP_S: Final = 0.01  # of the workers: without it, streams that began sooner run ahead alone, in messages of few tokens


async def traces(rounds: int, num_streams: int, stream_tokens: int) -> None:
    os.sched_setaffinity(0, other_cores())
    with ExitStack() as stack:
        folder = stack.enter_context(long_context_folder(default_model_folder()))
        words = words_of(folder)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))
        client, cases, batches = Client(session), [], []
        for ratio in RATIOS:
            endpoint, num_batches = stack.enter_context(_collector())
            settings = {"TANDEM_TRACE_RATIO": str(ratio), "OTEL_BSP_SCHEDULE_DELAY": str(SEND_DELAY_MS)}
            settings |= {"TANDEM_TRACE_ENDPOINT": endpoint} if ratio else {}
            gateway = stack.enter_context(tandem(folder, list(words.values()), NUM_WORKERS, settings, STEP_S))
            cases.append(Case(f"{ratio:.0%} traced", gateway, client.http))
            batches.append(num_batches)
        try:
            for case in cases:
                await warm_up(case)
            for turn in range(rounds):
                for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                    await one_by_one(case, [prompt_of(words, PROMPT_TOKENS) for _ in range(NUM_REQUESTS)], _sent)
                    await together(
                        case, [prompt_of(words, PROMPT_TOKENS) for _ in range(num_streams)], stream_tokens, _sent
                    )
        finally:
            await client.close()
            await session.close()
        if [bool(sum(num)) for num in batches] != [bool(ratio) for ratio in RATIOS]:
            raise ServerFailed(f"batches of spans: {batches}")
    print("| requests | CPU for each request, ms | least to most | tokens/s of its CPU, streams | least to most |")
    print("| --- | --- | --- | --- | --- |")
    for case in cases:
        each_ms = [1e3 * cpu_s for cpu_s in case.cpus_s]
        row = f"| {case.name} | {statistics.median(each_ms):.2f} | {min(each_ms):.2f} to {max(each_ms):.2f} |"
        rates = case.cpu_rates
        print(f"{row} {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} |")


async def _sent() -> None:
    """What has ended is with the collector."""
    await asyncio.sleep(3 * SEND_DELAY_MS / 1e3)


@contextmanager
def _collector() -> Iterator[tuple[str, list[int]]]:
    """Its URL, and the size of each batch that it took."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", sizes
        finally:
            server.shutdown()

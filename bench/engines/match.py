"""The engines of one run: started, asked in turn, and what was measured of each."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.engine_kernels import Floors
from bench.engines.contestants import REPOSITORY, Contestant
from bench.processes import process_tree, status_bytes

ANSWER_LIMIT_S: Final = 420.0  # vLLM compiles its graph when it loads
MIXED_PROMPT_TOKENS: Final = 2048
MIXED_LEAD: Final = 8
MIXED_WINDOW: Final = 32


class DriverFailed(Exception):
    """The engine ended or did not answer in time; the message says what its log holds."""


class Driver:
    """One running engine."""

    def __init__(self, contestant: Contestant, logs: Path) -> None:
        self._log = logs / f"{contestant.name.replace(' ', '-')}.log"
        self._process = subprocess.Popen(
            [contestant.python, "-m", contestant.module],
            cwd=REPOSITORY,
            env=os.environ | contestant.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
        )
        self._seconds = [0.0, 0.0]

    @property
    def core_share(self) -> float:
        return self._seconds[1] / self._seconds[0]

    def ask(self, action: str, **arguments: object) -> dict[str, Any]:
        """Raises: DriverFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = b""
        try:
            self._process.stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if selector.select(ANSWER_LIMIT_S):  # a driver answers with one whole line
                    line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise DriverFailed(f"no answer to {action!r}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        for index, seconds in enumerate(answer.get("took", [])):
            self._seconds[index] += seconds
        return answer

    def peak_bytes(self) -> int:
        """Most memory that the process and its children held, together, since the start or `forget_peak`."""
        return sum(status_bytes(pid, "VmHWM") for pid in process_tree(self._process.pid))

    def forget_peak(self) -> None:
        for pid in process_tree(self._process.pid):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


class Match:
    """The engines that still run, and what was measured: case -> engine -> a figure for each round, and its floors."""

    def __init__(self, floors: Callable[[], Floors], clock: int) -> None:
        self.drivers: dict[str, Driver] = {}
        self.figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.floors: dict[str, list[Floors]] = defaultdict(list)
        self._measure_floors = floors
        self._clock = clock
        self._seed = 0

    def ask(self, action: str, **arguments: object) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each engine's answer; one that fails is out from here on."""
        for name, driver in list(self.drivers.items()):
            try:
                yield name, driver.ask(action, **arguments)
            except DriverFailed as error:
                print(f"{name}: out, {error}", flush=True)
                del self.drivers[name]
                driver.stop()

    def rounds(self, number: int, deadline_s: float) -> Iterator[None]:
        """At least one."""
        for index in range(number):
            if index and time.monotonic() > deadline_s:
                print(f"time is up: {index} of {number} rounds", flush=True)
                return
            yield

    def prefill(self, tokens: int) -> None:
        title = f"prefill {tokens}, tok/s"
        self.floors[title].append(self._measure_floors())
        for name, answer in self.ask("prefill", tokens=tokens, seed=self._next_seed()):
            self.figures[title][name].append(tokens / answer["took"][self._clock])

    def fill(self, batch: int, context: int) -> None:
        contexts = {
            name: "{}-{}".format(*answer["contexts"])
            for name, answer in self.ask("fill", batch=batch, context=context, seed=self._next_seed())
        }
        print(f"decode {batch} starts at contexts {contexts}", flush=True)

    def decode(self, batch: int, steps: int) -> None:
        title = f"decode {batch}, tok/s"
        self.floors[title].append(self._measure_floors())
        for name, answer in self.ask("decode", steps=steps):
            assert answer["tokens"] == batch * steps, "an engine did not decode all sequences in each step"
            self.figures[title][name].append(answer["tokens"] / answer["took"][self._clock])

    def mixed(self) -> None:
        arguments = {"tokens": MIXED_PROMPT_TOKENS, "lead": MIXED_LEAD, "window": MIXED_WINDOW}
        for name, answer in self.ask("mixed", **arguments, seed=self._next_seed()):
            self.figures["TTFT"][name].append(answer["ttft"][self._clock])
            self.figures["ITL"][name] += [gap[self._clock] for gap in answer["gaps"]]

    def _next_seed(self) -> int:
        self._seed += 1000
        return self._seed


@contextmanager
def running(match: Match, found: list[Contestant]) -> Iterator[dict[str, int]]:
    """All engines started and loaded, one after the other. Gives: the memory that each needed to load."""
    logs = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    load_bytes = {}
    with ExitStack() as stack:
        for contestant in found:
            driver = Driver(contestant, logs)
            stack.callback(driver.stop)
            started_s = time.monotonic()
            try:
                version = driver.ask("load", **asdict(contestant.settings))["version"]
            except DriverFailed as error:
                print(f"{contestant.name}: out, {error}", flush=True)
                continue
            print(f"{contestant.name}: {version}, loaded in {time.monotonic() - started_s:.0f} s", flush=True)
            match.drivers[contestant.name] = driver
            load_bytes[contestant.name] = driver.peak_bytes()
            driver.forget_peak()
        yield load_bytes

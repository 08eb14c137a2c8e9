"""Ranks as processes: what they compute, and that none is lost unseen and none is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from cluster import processes
from core.errors import InvariantBroken, RankLost
from engine.models.decoder import Gather
from engine.parallel.runner import ParallelRunner
from engine.parallel.shard import Shard
from engine.step import NOT_FINITE, PROBE, SequenceSlice, StepPlan
from engine.torch_runner import TorchModelRunner
from tests.engine.parallel.leader import NUM_BLOCKS, make_shard, start_two
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import write_tiny_model
from tests.engine.token_stream import generate

BOUND_S = 20.0
PLAN = StepPlan((SequenceSlice("r", (5, 6), 0, (0,)),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny", vocab_size=260)


class Led:
    """A runner, its rank's process, and what it said of it."""

    def __init__(self, folder: Path, adapters: Mapping[str, Path] | None = None, **bounds: float) -> None:
        self.lost: list[RankLost] = []
        make = partial(make_shard, adapters=adapters)
        self.runner: ParallelRunner = start_two(folder, self.lost.append, make, **bounds)
        [child] = multiprocessing.active_children()
        assert child.pid is not None
        rank = processes.find(child.pid)
        assert rank is not None
        self.rank = rank


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Path]:
    """What "large" adds is beyond float32."""
    large = write_adapter(folder.parent / "large", folder, strength=1e30)
    return {"a": write_adapter(folder.parent / "a", folder), "large": large}


@pytest.fixture
def led(folder: Path, adapters: dict[str, Path]) -> Iterator[Led]:
    led = Led(folder, adapters)
    yield led
    led.runner.close()
    assert not processes.is_alive(led.rank)


def until_gone(process: processes.Process, bound_s: float = BOUND_S) -> None:
    end_s = time.monotonic() + bound_s
    while processes.is_alive(process):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_two_processes_say_the_tokens_of_one_and_a_rank_that_hangs_is_lost(
    led: Led, folder: Path, adapters: dict[str, Path]
) -> None:
    one = TorchModelRunner.load(folder, "float32", NUM_BLOCKS, adapters=adapters)
    prompts = [[5 + 7 * index % 250 for index in range(length)] for length in (1, 17, 70)]
    for mix in (("",), ("a", "", "a")):
        assert generate(led.runner, prompts, (12, 8, 3), 48, mix) == generate(one, prompts, (12, 8, 3), 48, mix)
    large = SequenceSlice("large", (5, 6), 16, (4, 5), (PROBE,), adapter_digest="large")
    disturbed = StepPlan((SequenceSlice("r", (5, 6), 0, (0,), (PROBE,)), large), copies=((3, 7),))
    answers = led.runner.run(disturbed)
    assert answers == one.run(disturbed)
    assert answers[1] == (NOT_FINITE,) != answers[0]
    assert torch.equal(torch.cat(led.runner.kv_pools, dim=3), one.kv_pool)
    assert not any(pool[5].any() for pool in led.runner.kv_pools)
    assert led.runner.geometry == one.geometry
    for nowhere in (StepPlan((SequenceSlice("r", (5,), 0, (NUM_BLOCKS,)),)), StepPlan(PLAN.slices, ((0, NUM_BLOCKS),))):
        with pytest.raises(InvariantBroken, match=f"pool of {NUM_BLOCKS}"):
            led.runner.run(nowhere)
    led.runner.run(PLAN)  # no rank was told of them, and so none has ended
    assert led.lost == []
    os.kill(led.rank.pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match="hangs"):
        led.runner.run(PLAN)
    until_gone(led.rank)
    assert len(led.lost) == 1


def test_a_rank_that_is_frozen_is_lost_before_its_step_is_late_and_without_any_step(folder: Path) -> None:
    led = Led(folder, silence_timeout_s=1.5, step_timeout_s=600.0)
    try:
        led.runner.run(PLAN)
        with pytest.raises(AssertionError):
            until_gone(led.rank, 1.6)  # it beats
        os.kill(led.rank.pid, signal.SIGSTOP)
        until_gone(led.rank)
        with pytest.raises(RankLost, match="stands still"):
            led.runner.run(PLAN)
        assert len(led.lost) == 1
    finally:
        led.runner.close()


def fail_as_rank(folder: Path, shard: Shard, pool: torch.Tensor, gather: Gather) -> TorchModelRunner:
    assert shard.rank == 0
    return make_shard(folder, shard, pool, gather)


def test_a_rank_that_cannot_start_fails_the_start(folder: Path) -> None:
    lost: list[RankLost] = []
    with pytest.raises(RankLost, match="rank 1 ended with exit code 1"):
        start_two(folder, lost.append, fail_as_rank)
    assert multiprocessing.active_children() == []
    assert lost == []


def test_a_rank_that_dies_between_steps_is_told_at_once_and_fails_the_next(led: Led) -> None:
    led.runner.run(PLAN)
    os.kill(led.rank.pid, signal.SIGKILL)
    until_gone(led.rank)
    with pytest.raises(RankLost, match="rank 1 ended with exit code -9"):
        led.runner.run(PLAN)
    assert len(led.lost) == 1


def test_no_rank_outlives_its_leader_however_that_ends(folder: Path) -> None:
    """Not even one that is frozen, and can therefore do nothing itself."""
    command = [sys.executable, "-m", "tests.engine.parallel.leader", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        rank = processes.find(int(leader.stdout.readline()))
        assert rank is not None and processes.is_alive(rank)
        os.kill(rank.pid, signal.SIGSTOP)
        leader.kill()
        leader.wait(BOUND_S)
        until_gone(rank)

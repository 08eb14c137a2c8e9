"""A few schedules of each soak, and that each can fail; the long ones: `python -m tests.simulation.soak --help`."""

from __future__ import annotations

import pytest

from tests.simulation import chained_kv, handoff_world
from tests.simulation.planted_bugs import PLANTS
from tests.simulation.real_soak import Broken, soak
from tests.simulation.soak import walk_all, walk_on_all_cores
from tests.simulation.world_host import WorkForNobody


def silent(_line: str) -> None: ...


async def test_schedules_over_nixl_end_as_a_single_engine_says_with_every_block_back() -> None:
    seen = await soak(0, 12, "auto", "", silent)
    assert seen["schedules"] == 12
    assert seen["requests finished"] > 12 and seen["pushes"] > 12


async def test_a_soak_over_nixl_finds_pages_that_are_freed_too_early() -> None:
    with pytest.raises(Broken, match="written while they were free"):
        await soak(0, 100, "auto", "free-before-drain", silent)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_soak_on_virtual_time_finds_each_planted_bug(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walk_all(range(2))
    PLANTS[plant](monkeypatch.setattr)
    foreign = (chained_kv.WriteIntoForeignBlock, handoff_world.WriteIntoForeignBlock)
    with pytest.raises((*foreign, WorkForNobody)) as found:  # a hand-off that is never told its end is seen first
        walk_all(range(100))
    assert any("--first-seed" in note for note in found.value.__notes__)


def test_what_a_process_of_the_soak_finds_ends_it_with_the_way_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PLANTS["free-before-drain"](monkeypatch.setattr)
    with pytest.raises(SystemExit, match="soak --schedules 1 --first-seed"):
        walk_on_all_cores(range(100))

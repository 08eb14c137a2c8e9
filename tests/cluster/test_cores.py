"""Which cores workers compute on first."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cores import apart

SIDE_BY_SIDE = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
IN_HALVES = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


@pytest.mark.parametrize(
    ("siblings", "cores", "ordered"),
    [
        (SIDE_BY_SIDE, {0, 1, 2, 3}, [0, 2, 1, 3]),
        (SIDE_BY_SIDE, {1, 2, 3}, [1, 2, 3]),
        (IN_HALVES, {0, 1, 2, 3}, [0, 1, 2, 3]),
        ({}, {5, 4}, [4, 5]),
    ],
)
def test_threads_of_one_physical_core_are_not_both_among_the_first(
    tmp_path: Path, siblings: dict[int, str], cores: set[int], ordered: list[int]
) -> None:
    for core, listed in siblings.items():
        folder = tmp_path / f"devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{listed}\n")
    assert apart(cores, tmp_path) == ordered

"""`tandem drill` on a live cluster: it passes, it needs a word, and it tells what is wrong."""

from __future__ import annotations

import pytest

from cluster.drill import Drill
from cluster.main import main
from tests.acceptance.running_cluster import RunningCluster


def drill(cluster: RunningCluster, *flags: str) -> int:
    addresses = ["--url", cluster.http, "--registry", cluster.registry, "--controller", cluster.controller]
    return main(["drill", *addresses, *flags])


def test_a_drill_passes_and_prints_its_figures(two_decodes: RunningCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert drill(two_decodes, "--yes") == 0
    out = capsys.readouterr().out
    print(out)
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "PASS  a decode worker is killed mid-stream",
        "PASS  a client leaves mid-transfer",
        "PASS  a decode worker restarts",
        "PASS  Redis stands still",
    ]
    assert all("4 of 4 streams equal" in lines[index] for index in (0, 2, 3))


def test_streams_that_say_something_else_end_it_with_code_1(
    two_decodes: RunningCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(_drill: Drill, _number: int) -> str:
        async with _drill._streams() as streams:
            streams[0].tokens[0] += 1
        return _drill._equal(streams)

    monkeypatch.setattr(Drill, "_end_a_worker", nothing)
    assert drill(two_decodes, "--yes") == 1
    assert "1 of 4 streams differ" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "named"), [((), "--yes"), (("--yes", "--registry", "10.0.0.1:1"), "--registry")])
def test_a_drill_must_be_meant_and_stays_on_this_machine(
    two_decodes: RunningCluster, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drill(two_decodes, *flags) == 2
    assert named in capsys.readouterr().err

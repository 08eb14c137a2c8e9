"""The house's own order: lists of rooms equal the folders, `__init__.py` files are empty, what pages name exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NOT_ROOMS = {"tests", "bench"}  # ours too, but imported by no room

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# In backticks, with at least one slash: a path of this repository.
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")
ELSEWHERE = re.compile(r"^(/|\.venv/|\.hypothesis/)")  # made by us, not committed


def rooms() -> set[str]:
    """Folders at the root that can be imported."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_ROOMS


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def layered(layers: list[str]) -> set[str]:
    return {name.strip() for layer in layers for name in layer.split("|")}


def test_every_list_of_rooms_names_the_folders_that_exist() -> None:
    tool = settings()
    packages = {name.removesuffix("*") for name in tool["setuptools"]["packages"]["find"]["include"]}
    contracts = tool["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert packages - {"tandem"} == rooms()  # `tandem` is the stubs' package, below proto/python
    assert set(tool["importlinter"]["root_packages"]) == rooms()
    assert layered(layers) == rooms()
    assert set(tool["ruff"]["lint"]["isort"]["known-first-party"]) == rooms() | NOT_ROOMS


def test_every_room_is_typed_strictly() -> None:
    mypy = settings()["mypy"]
    assert mypy["strict"]
    assert set(mypy["files"]) == rooms()


def test_what_the_contracts_forbid_binds_modules_that_exist() -> None:
    forbidden = {
        contract["name"]: set(contract["source_modules"])
        for contract in settings()["importlinter"]["contracts"]
        if contract["type"] == "forbidden"
    }
    assert forbidden["one door each to Ray, Redis, traces and a GPU's figures"] == rooms()
    assert forbidden["tensors stay in the engine"] == rooms() - {"engine"}
    for name in set.union(*forbidden.values()):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), name


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by their bare names: the second of two would not be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_no_wait_swallows_a_cancellation() -> None:
    """Python 3.11's asyncio.wait_for loses a cancel that comes as its future is done; asyncio.timeout does not."""
    modules = [path for room in rooms() for path in (ROOT / room).rglob("*.py")]
    assert len(modules) > 50
    assert [str(path) for path in modules if "asyncio.wait_for(" in path.read_text()] == []


def test_init_files_are_empty() -> None:
    folders = [*rooms(), "proto/python"]
    filled = [path for name in folders for path in (ROOT / name).rglob("__init__.py") if path.read_bytes()]
    assert filled == []


def test_proto_hides_no_other_package() -> None:
    """`proto` is also the import name of a published package."""
    assert (ROOT / "proto/tandem/v1").is_dir()
    assert list((ROOT / "proto").glob("*.py")) == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_links_to_or_names_exists(page: Path) -> None:
    text = page.read_text()
    links = [target.partition("#")[0] for target in LINK.findall(text) if "://" not in target]
    missing = [target for target in links if target and not (page.parent / target).exists()]
    named = [name for name in PATH.findall(text) if not ELSEWHERE.match(name)]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_every_decision_has_a_number_of_its_own() -> None:
    pages = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert [page.name for page in pages if not page.read_text().startswith(f"# {page.name[:4]} ")] == []


def test_pages_are_looked_at() -> None:
    """The positive control of the test above: its patterns find what is there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert "core/handoff.py" in PATH.findall(text)
    assert "docs/adr/" in PATH.findall(text)
    assert "ARCHITECTURE.md" in LINK.findall((ROOT / "README.md").read_text())

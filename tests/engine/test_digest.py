"""Digests are read once, kept below TANDEM_CACHE, and never those of other content."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import BadModel
from engine import digest
from engine.digest import adapter_digest, tokenizer_digest, unchanged, weights_digest
from tests.engine.random_adapters import write_adapter
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose files have equal sizes; read only."""
    root = tmp_path_factory.mktemp("models")
    return write_tiny_model(root / "one"), write_tiny_model(root / "two", seed=1)


@pytest.fixture
def folder(models: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first to spoil."""
    return Path(shutil.copytree(models[0], tmp_path / "model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read whole."""
    names: list[str] = []
    read = digest._read_digest

    def count(path: Path) -> str:
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(digest, "_read_digest", count)
    return names


def test_a_file_is_read_once_and_nothing_is_written_beside_it(folder: Path, reads: list[str]) -> None:
    before = sorted(folder.iterdir())
    first = weights_digest(folder)
    assert reads == ["config.json", "model.safetensors"]
    assert weights_digest(folder) == first
    assert len(reads) == 2
    assert sorted(folder.iterdir()) == before


def _replace(file: Path, other: Path) -> None:
    shutil.copyfile(other, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


def _overwrite(file: Path, other: Path) -> None:
    file.write_bytes(other.read_bytes())


@pytest.mark.parametrize("change", [_replace, _overwrite])
def test_other_content_of_equal_size_name_and_time_is_another_digest(
    models: tuple[Path, Path], folder: Path, change: Callable[[Path, Path], None]
) -> None:
    file = folder / "model.safetensors"
    status, before = file.stat(), weights_digest(folder)
    change(file, models[1] / file.name)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert weights_digest(folder) == weights_digest(models[1]) != before


def test_a_damaged_entry_is_made_again(folder: Path, cache: Path) -> None:
    first = weights_digest(folder)
    entries = list(cache.iterdir())
    assert len(entries) == 2
    for entry, damage in zip(entries, (b"", b"\xff" * 64), strict=True):
        entry.write_bytes(damage)
    assert weights_digest(folder) == first
    assert {len(entry.read_bytes()) for entry in cache.iterdir()} == {64}


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, cache: Path, reads: list[str]) -> None:
    cache.parent.mkdir()
    cache.write_text("not a folder")
    assert weights_digest(folder) == weights_digest(folder)
    assert len(reads) == 4


DIGEST_OFTEN = """
import os, shutil, sys
from pathlib import Path
from engine.digest import weights_digest
for _ in range(50):
    shutil.rmtree(Path(os.environ["TANDEM_CACHE"]) / "digests", ignore_errors=True)
    print(weights_digest(Path(sys.argv[1])))
"""


def test_several_processes_write_at_once(folder: Path) -> None:
    """And take entries and their folder away meanwhile."""
    command = [sys.executable, "-c", DIGEST_OFTEN, str(folder)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [writer.communicate(timeout=30.0)[0].splitlines() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [len(output) for output in outputs] == [50, 50, 50]
    assert {line for output in outputs for line in output} == {weights_digest(folder)}


def test_a_folder_that_changes_while_it_is_loaded_is_refused(models: tuple[Path, Path], folder: Path) -> None:
    """Even where it is as before when both digests are read."""
    adapter = write_adapter(folder.parent / "adapter", folder)
    with unchanged([folder, adapter]):
        first = weights_digest(folder), tokenizer_digest(folder), adapter_digest(adapter)
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()

    def put_back() -> None:
        file.write_bytes(content[::-1])
        file.write_bytes(content)

    changes: list[Callable[[], object]] = [
        put_back,
        lambda: _replace(folder / "model.safetensors", models[1] / "model.safetensors"),
        lambda: shutil.copyfile(folder / "model.safetensors", folder / "more.safetensors"),
        lambda: (folder / "tokenizer.json").unlink(),
    ]
    for change in changes:
        with pytest.raises(BadModel, match="changed while it was loaded"), unchanged([folder, adapter]):
            change()
    assert adapter_digest(adapter) == first[2]
    with pytest.raises(BadModel, match="cannot be read"), unchanged([folder / "nowhere"]):
        pass

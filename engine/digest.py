"""Content digests of a model folder: part of the identity under which cached KV may be found."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from core.errors import BadModel
from core.identity import Adapter
from engine.adapter_config import CONFIG_FILE, TENSOR_FILE
from engine.cache_folder import cache_folder

DIGEST_FORM: Final = re.compile("[0-9a-f]{64}")
LOADED_SUFFIXES: Final = (".json", ".safetensors")

Stamp = tuple[str, int, int, int, int, int]  # of a file: another content gives another one, whatever its name or mtime


def weights_digest(folder: Path) -> str:
    """SHA-256, in hex, over config.json and every safetensors file: what the KV of given token ids depends on.

    Raises: BadModel: a file is missing or cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModel(f"{folder}: no safetensors file")
    return _digest_files([folder / "config.json", *files], _known_digest)


def adapter_digest(folder: Path) -> str:
    """SHA-256, in hex, over a LoRA adapter's files, read each time. Raises: BadModel: one is missing or unreadable."""
    return _digest_files((folder / name for name in (CONFIG_FILE, TENSOR_FILE)), _read_digest)


def read_adapters(folders: Mapping[str, Path]) -> dict[str, Adapter]:
    """The adapters of the folders, by their names. Raises: BadModel: see `adapter_digest`."""
    return {name: Adapter(name, adapter_digest(folder)) for name, folder in folders.items()}


def tokenizer_digest(folder: Path) -> str:
    """SHA-256, in hex, over tokenizer.json. Raises: BadModel: it is missing or cannot be read."""
    return _digest_files([folder / "tokenizer.json"], _known_digest)


@contextmanager
def unchanged(folders: Iterable[Path]) -> Iterator[None]:
    """Inside, what is read of the folders is of one moment, or BadModel is raised in the end: else weights of one
    content could serve under the digest of another, and their KV be found by it."""
    before = {folder: _stamps(folder) for folder in folders}
    yield
    for folder, stamps in before.items():
        if _stamps(folder) != stamps:
            raise BadModel(f"{folder}: changed while it was loaded")


def _digest_files(paths: Iterable[Path], digest: Callable[[Path], str]) -> str:
    """Over names and content digests of `paths`, in order."""
    joined = hashlib.sha256()
    for path in paths:
        try:
            joined.update(f"{path.name}\0{digest(path)}\n".encode())
        except OSError as error:
            raise BadModel(f"{path}: cannot be read: {error}") from error
    return joined.hexdigest()


def _read_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known_digest(path: Path) -> str:
    """SHA-256 of one file, read once per stamp: half a gigabyte takes 0.5 s or more."""
    stamp = _stamp(path)
    entry = cache_folder() / "digests" / hashlib.sha256(repr(stamp).encode()).hexdigest()
    with suppress(OSError, ValueError):
        known = entry.read_text(encoding="ascii")
        if DIGEST_FORM.fullmatch(known):
            return known
    digest = _read_digest(path)
    if _stamp(path) == stamp:
        _write_entry(entry, digest)
    return digest


def _write_entry(entry: Path, digest: str) -> None:
    """In one step, as others may read or write it now. A cache that cannot be written stays without it."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(digest)
        os.replace(name, entry)


def _stamp(path: Path) -> Stamp:
    """The time of the last change of anything, ctime, is the one that nobody can set."""
    status = path.stat()
    place = os.path.realpath(path)
    return (place, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Of what is loaded of a folder. Raises: BadModel: it cannot be read."""
    try:
        return {path.name: _stamp(path) for path in folder.iterdir() if path.suffix in LOADED_SUFFIXES}
    except OSError as error:
        raise BadModel(f"{folder}: cannot be read: {error}") from error

"""Content digests of a model folder: part of the identity under which cached KV may be found."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from core.errors import BadModel
from core.identity import Adapter
from engine.adapter_config import CONFIG_FILE, TENSOR_FILE

CACHE_FILE: Final = ".tandem_digests.json"


def weights_digest(folder: Path) -> str:
    """SHA-256, in hex, over config.json and every safetensors file: what the KV of given token ids depends on.

    Raises: BadModel: a file is missing or cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadModel(f"{folder}: no safetensors file")
    return _digest_files([folder / "config.json", *files], _known_digest)


def adapter_digest(folder: Path) -> str:
    """SHA-256, in hex, over a LoRA adapter's files. Raises: BadModel: one is missing or cannot be read.

    Read each time: adapters of one kind have one size, those of an image often one time, and whoever wrote the folder
    could have put digests of another adapter's beside it, which would then share its KV.
    """
    return _digest_files((folder / name for name in (CONFIG_FILE, TENSOR_FILE)), _read_digest)


def read_adapters(folders: Mapping[str, Path]) -> dict[str, Adapter]:
    """The adapters of the folders, by their names. Raises: BadModel: see `adapter_digest`."""
    return {name: Adapter(name, adapter_digest(folder)) for name, folder in folders.items()}


def tokenizer_digest(folder: Path) -> str:
    """SHA-256, in hex, over tokenizer.json. Raises: BadModel: it is missing or cannot be read."""
    return _digest_files([folder / "tokenizer.json"], _known_digest)


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
    """SHA-256 of one file, read once per (name, size, modification time): half a gigabyte takes 0.5 s or more."""
    status = path.stat()
    key = f"{path.name}:{status.st_size}:{status.st_mtime_ns}"
    cached = _read_cache(path.parent)
    if key not in cached:
        cached[key] = _read_digest(path)
        _write_cache(path.parent, cached)
    return cached[key]


def _read_cache(folder: Path) -> dict[str, str]:
    """Known digests; empty where there is no cache or a damaged one."""
    try:
        loaded = json.loads((folder / CACHE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _write_cache(folder: Path, digests: dict[str, str]) -> None:
    """Replace the cache in one step; a read-only folder simply stays without one."""
    if not os.access(folder, os.W_OK):
        return
    handle, name = tempfile.mkstemp(dir=folder, prefix=CACHE_FILE)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(digests, file)
    os.replace(name, folder / CACHE_FILE)

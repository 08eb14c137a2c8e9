"""Writes a model folder in Hugging Face form, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.tensor_files import SINGLE_FILE


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write to, renamed to it in the end; where another was first, its folder stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield staging
        staging.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users of a shared cache
        try:
            os.rename(staging, target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write all tensors into one file, the same to the byte wherever it is written: workers pair by its digest."""
    file = folder / SINGLE_FILE
    save_file(tensors, file, metadata={"format": "pt", **metadata})
    _sort_metadata(file)
    file.chmod(0o644)  # safetensors writes 0600; the other files are readable by all


def _sort_metadata(file: Path) -> None:
    """safetensors leaves their order to chance."""
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the header has grown"
        stream.seek(8)
        stream.write(text.ljust(length))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object as people like to read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""The safetensors files of a model folder: which tensors they hold, in which form, and their contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from core.errors import BadModel
from engine.json_file import read_json_object
from engine.quantisation import (
    BLOCK_KINDS,
    BLOCK_VALUES,
    Matrix,
    QuantisedMatrix,
    as_floats,
    is_finite,
    metadata_key,
)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOATS: Final = ("F32", "F16", "BF16")  # as safetensors spells them
BYTES: Final = "U8"


class TensorFiles:
    """The safetensors files of a folder as one mapping from tensor name to tensor.

    file: its name; None: a model's one file, or those that its index names.
    asked_by: what says which shapes the tensors must have.
    """

    def __init__(self, folder: Path, file: str | None = None, asked_by: str = "config.json") -> None:
        self._folder = folder
        self._file = file
        self._asked_by = asked_by
        self._file_of: dict[str, Any] = {}
        self._kind_of: dict[str, str] = {}
        for path in self._paths():
            try:
                opened: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise BadModel(f"{path.name}: cannot be read as safetensors: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)
            metadata = opened.metadata() or {}
            kinds = {name: metadata.get(metadata_key(name)) for name in opened.keys()}  # noqa: SIM118
            self._kind_of |= {name: kind for name, kind in kinds.items() if kind is not None}

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Raise BadModel unless all expected tensors and no unknown ones are there, with their shapes, in a form that
        we read."""
        known = {**optional, **expected}
        problems = [
            f"missing tensor {name} {list(expected[name])}" for name in sorted(expected.keys() - self._file_of.keys())
        ]
        problems += [f"unexpected tensor {name}" for name in sorted(self._file_of.keys() - known.keys())]
        for name in sorted(known.keys() & self._file_of.keys()):
            problems += self._problems(name, known[name])
        if problems:
            raise BadModel(f"{self._folder}: {'; '.join(problems)}")

    def has(self, name: str) -> bool:
        """Whether the files hold it."""
        return name in self._file_of

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`: a view of the mapped file where it already has it. Raises: BadModel: not finite."""
        return as_floats(self.read_stored(name, dtype), dtype)

    def read_stored(self, name: str, dtype: torch.dtype) -> Matrix:
        """As `read`, but blocks as they are."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if kind := self._kind_of.get(name):
            matrix: Matrix = QuantisedMatrix.of_rows(kind, tensor)
        else:
            matrix = tensor.to(dtype)
        if not is_finite(matrix):
            raise BadModel(f"{self._folder}: tensor {name} holds NaN or infinity")
        return matrix

    def require_equal(self, name: str, other: str) -> None:
        """Raise BadModel unless the two tensors are equal."""
        if not torch.equal(self.read(name, torch.float32), self.read(other, torch.float32)):
            raise BadModel(f"tensor {name} differs from {other}, but config.json says tie_word_embeddings")

    def _problems(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        stored = self._file_of[name].get_slice(name)
        found, dtype = tuple(stored.get_shape()), stored.get_dtype()
        kind = self._kind_of.get(name)
        if kind is None:
            if dtype not in FLOATS:
                yield f"tensor {name} has dtype {dtype}, supported are {', '.join(FLOATS)}"
        elif kind not in BLOCK_KINDS:
            yield f"tensor {name} has blocks of kind {kind}, supported are {', '.join(BLOCK_KINDS)}"
            return
        elif dtype != BYTES:
            yield f"tensor {name} has dtype {dtype}, blocks of {kind} need {BYTES}"
        elif len(shape) != 2 or shape[1] % BLOCK_VALUES:
            yield f"tensor {name} has blocks of {kind}, but its rows of {shape[-1]} are not made of {BLOCK_VALUES}"
            return
        else:
            shape = (shape[0], shape[1] // BLOCK_VALUES * BLOCK_KINDS[kind].block_bytes)
        if found != shape:
            unit = "" if kind is None else f" bytes of {kind}"
            yield f"tensor {name} has shape {list(found)}, {self._asked_by} asks for {list(shape)}{unit}"

    def _paths(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if self._file is not None or not index.exists():
            return [self._folder / (self._file or SINGLE_FILE)]
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BadModel(f"{index.name}: weight_map: missing")
        for name in weight_map.values():  # what lies elsewhere is not in the digest (engine/digest.py)
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise BadModel(f"{index.name}: weight_map: must name safetensors files beside it, got {name!r}")
        return [self._folder / name for name in sorted(set(weight_map.values()))]

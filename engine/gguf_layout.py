"""Whether a GGUF is whole: every count, length and place that it states lies within it.

Asked before gguf's reader, which believes what a file says: it walks an array of 2**60 numbers past the file's end.
Costs a step for each field, string and tensor, none for a number or a byte of a tensor.
Source: the GGUF specification in ggml's docs/gguf.md; tensors lie one after another, as llama.cpp demands, too.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import gguf

from core.errors import BadModel

VERSIONS: Final = (2, 3)
LITTLE_ENDIAN_MAGIC: Final = b"GGUF"
DEFAULT_ALIGNMENT: Final = 32
MAX_NAME_BYTES: Final = 2**16
MAX_DIMENSIONS: Final = 4
MAX_ELEMENTS: Final = 2**22  # of an array; the largest vocabularies have 2**18 tokens, and twice as many merges

TYPES: Final = gguf.GGUFValueType
NUMBER_BYTES: Final = {
    TYPES.UINT8: 1,
    TYPES.INT8: 1,
    TYPES.BOOL: 1,
    TYPES.UINT16: 2,
    TYPES.INT16: 2,
    TYPES.UINT32: 4,
    TYPES.INT32: 4,
    TYPES.FLOAT32: 4,
    TYPES.UINT64: 8,
    TYPES.INT64: 8,
    TYPES.FLOAT64: 8,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies. offset: from the start of all tensors' data, bytes."""

    name: str
    offset: int
    num_bytes: int


def require_whole(source: Path) -> None:
    """Raises: BadModel: `source` cannot be read, is no GGUF, or not a whole one, by the first field or tensor that says
    so."""
    try:
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).require_whole()
    except OSError as error:
        raise BadModel(f"{source}: cannot be read: {error}") from error
    except ValueError as error:
        raise BadModel(f"{source}: cannot be read as GGUF: damaged, or not all of it is here ({error})") from error


class _Walk:
    """Goes over what stands before the tensors' data, once. Raises ValueError, by `_where`."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._offset = 0
        self._where = "header"

    def require_whole(self) -> None:
        if self._bytes(4) != LITTLE_ENDIAN_MAGIC:
            raise self._damaged("it does not start with GGUF")
        version = self._integer(4)
        if version not in VERSIONS:
            raise self._damaged(f"version {version} is not supported, only {VERSIONS}, little-endian")
        num_tensors, num_fields = self._integer(8), self._integer(8)
        alignment = self._fields(num_fields)
        places = self._tensors(num_tensors)
        self._require_places(places, alignment)

    def _fields(self, count: int) -> int:
        """Past the metadata. Returns the alignment of tensors' data, bytes."""
        alignment = DEFAULT_ALIGNMENT
        names: set[str] = set()
        for index in range(count):
            self._where = f"metadata field {index + 1} of {count}"
            name = self._name(names)
            self._where = f"metadata field {name}"
            value_type = self._integer(4)
            if name == "general.alignment":
                alignment = self._alignment(value_type)
            elif value_type == TYPES.ARRAY:
                self._array()
            else:
                self._values(value_type, 1)
        return alignment

    def _alignment(self, value_type: int) -> int:
        alignment = self._integer(4)
        if value_type != TYPES.UINT32 or alignment.bit_count() != 1:
            raise self._damaged("must be a power of two, uint32")
        return alignment

    def _array(self) -> None:
        element_type, count = self._integer(4), self._integer(8)
        if count > MAX_ELEMENTS:
            raise self._damaged(f"{count} elements, at most {MAX_ELEMENTS} are read")
        self._values(element_type, count)

    def _values(self, value_type: int, count: int) -> None:
        if value_type == TYPES.STRING:
            for _ in range(count):
                self._skip(self._integer(8))
        elif value_type in NUMBER_BYTES:
            self._skip(count * NUMBER_BYTES[TYPES(value_type)])
        else:
            raise self._damaged(f"type {value_type} is not read here")

    def _tensors(self, count: int) -> list[_Place]:
        """Past the descriptions of all tensors."""
        names: set[str] = set()
        places = []
        for index in range(count):
            self._where = f"tensor {index + 1} of {count}"
            name = self._name(names)
            self._where = f"tensor {name}"
            num_dimensions = self._integer(4)
            if num_dimensions > MAX_DIMENSIONS:
                raise self._damaged(f"{num_dimensions} dimensions, at most {MAX_DIMENSIONS} are read")
            shape = [self._integer(8) for _ in range(num_dimensions)]
            num_bytes = self._num_bytes(self._integer(4), shape)
            places.append(_Place(name, self._integer(8), num_bytes))
        return places

    def _num_bytes(self, kind: int, shape: list[int]) -> int:
        """shape: as it stands in a GGUF, a row's length first."""
        sizes = {int(known): block for known, block in gguf.GGML_QUANT_SIZES.items()}
        if kind not in sizes:
            raise self._damaged(f"kind of storage {kind} is not known")
        block_values, block_bytes = sizes[kind]
        if shape and shape[0] % block_values:
            raise self._damaged(f"its rows of {shape[0]} are not made of blocks of {block_values}")
        return prod(shape) // block_values * block_bytes

    def _require_places(self, places: list[_Place], alignment: int) -> None:
        """Tensors' data fill the rest of the file, each at the next aligned byte after the one before."""

        def aligned(offset: int) -> int:
            return -(-offset // alignment) * alignment

        start, end = aligned(self._offset), 0
        for place in places:
            self._where = f"tensor {place.name}"
            if place.offset != end:
                raise self._damaged(f"starts at byte {place.offset} of the tensors, the one before ends at {end}")
            last = start + end + place.num_bytes
            if last > self._size:
                raise self._damaged(f"ends at byte {last}, the file at {self._size}")
            end = aligned(end + place.num_bytes)
        if self._size > start + end:
            raise self._damaged(f"{self._size - start - end} bytes follow the last tensor")

    def _name(self, others: set[str]) -> str:
        length = self._integer(8)
        if length > MAX_NAME_BYTES:
            raise self._damaged(f"its name has {length} bytes, at most {MAX_NAME_BYTES} are read")
        try:
            name = self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"its name is not UTF-8: {error}") from error
        if name in others:
            raise self._damaged(f"its name, {name}, stands there twice")
        others.add(name)
        return name

    def _integer(self, num_bytes: int) -> int:
        return int.from_bytes(self._bytes(num_bytes), "little")

    def _bytes(self, count: int) -> bytes:
        start = self._offset
        self._skip(count)
        return self._data[start : start + count]

    def _skip(self, count: int) -> None:
        if count > self._size - self._offset:
            raise self._damaged(f"goes on for {count} bytes, the file for {self._size - self._offset}")
        self._offset += count

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self._where}: {what}")

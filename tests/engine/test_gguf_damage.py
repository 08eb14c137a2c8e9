"""A GGUF with a damaged byte, or cut short, is refused by name or keeps its tensors, after little work."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
from safetensors.torch import load_file

from core.errors import BadModel
from engine.gguf_import import folder_for, import_gguf
from engine.gguf_layout import require_whole
from tests.engine.gguf_files import CONFIG, model_fields, tokenizer_fields, write_gguf
from tests.engine.tiny_model import tiny_tensors

NUM_IMPORTS: Final = 120  # of files with one damaged byte
NUM_WALKS: Final = 800
MAX_READS: Final = 10_000  # of one file; the whole one takes fewer than 1,000
COUNT: Final = 2**60
TYPE_FIELD: Final = b"tokenizer.ggml.token_type"


@pytest.fixture(autouse=True)
def _bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in which gguf's reader reads more pieces of a file than a small one has, each an object it keeps."""
    get = gguf.GGUFReader._get

    def counted(reader: Any, *args: Any, **kwargs: Any) -> Any:
        reader.reads = getattr(reader, "reads", 0) + 1
        if reader.reads > MAX_READS:
            pytest.fail(f"more than {MAX_READS} reads", pytrace=False)
        return get(reader, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFReader, "_get", counted)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    fields = model_fields("llama", CONFIG) | tokenizer_fields()
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    return write_gguf(path, "llama", fields, tiny_tensors(CONFIG, seed=5)).read_bytes()


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return tiny_tensors(CONFIG, seed=5)


@pytest.fixture(scope="module")
def data_start(whole: bytes, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Where tensors begin."""
    path = tmp_path_factory.mktemp("start") / "model.gguf"
    path.write_bytes(whole)
    return int(gguf.GGUFReader(path).data_offset)


def _import(source: Path) -> dict[str, torch.Tensor] | str:
    """The tensors of the imported folder, which is removed, or why `source` was refused."""
    folder = source.parent / "out"
    try:
        return load_file(import_gguf(source, folder, lambda _line: None) / "model.safetensors")
    except BadModel as error:
        assert not folder.exists()
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_damaged_byte_is_refused_by_name_or_harms_no_tensor(
    tmp_path: Path, whole: bytes, data_start: int, tensors: dict[str, torch.Tensor]
) -> None:
    """Some bytes can change unseen, such as a token's; none in a way that moves a tensor."""
    source, drawn = tmp_path / "model.gguf", random.Random(7)
    refused = 0
    for position in drawn.sample(_structure(whole, data_start), NUM_IMPORTS):
        source.write_bytes(_with_byte(whole, position, drawn))
        found = _import(source)
        if isinstance(found, str):
            assert "model.gguf: " in found, position
            refused += 1
        else:
            assert found.keys() == tensors.keys(), position
            assert all(torch.equal(found[name], tensors[name]) for name in tensors), position
    assert NUM_IMPORTS // 2 < refused < NUM_IMPORTS


def test_every_file_with_a_damaged_byte_is_read_or_refused(tmp_path: Path, whole: bytes, data_start: int) -> None:
    """Damage anywhere before the tensors; what the check lets pass gguf's reader reads."""
    source, drawn = tmp_path / "model.gguf", random.Random(8)
    read = 0
    for _ in range(NUM_WALKS):
        source.write_bytes(_with_byte(whole, drawn.randrange(data_start), drawn))
        try:
            require_whole(source)
        except BadModel:
            continue
        read += 1
        if read % 20 == 0:  # the reader takes ten times as long
            gguf.GGUFReader(source)
    assert 0 < read < NUM_WALKS


def test_a_file_cut_short_is_refused(tmp_path: Path, whole: bytes, data_start: int) -> None:
    source = tmp_path / "model.gguf"
    for size in [*range(0, data_start, 31), *range(data_start, len(whole) - 32, 997), len(whole) - 33]:
        source.write_bytes(whole[:size])
        with pytest.raises(BadModel, match=r"model\.gguf: cannot be read"):
            require_whole(source)
    source.write_bytes(whole)
    assert isinstance(_import(source), dict)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


# What stands before what is replaced; how many bytes lie between; by what; what is named.
LIES: Final = {
    "count of fields": (b"GGUF", 12, _u64(COUNT), "metadata field 17 of 1152921504606846976"),
    "count of tensors": (b"GGUF", 4, _u64(COUNT), "tensor 12 of 1152921504606846976"),
    "array of bytes": (TYPE_FIELD, 4, _u32(0) + _u64(COUNT), "token_type: 1152921504606846976 elements, at most"),
    "array of numbers": (TYPE_FIELD, 8, _u64(COUNT), "token_type: 1152921504606846976 elements, at most"),
    "array beyond the file": (TYPE_FIELD, 8, _u64(2**20), "metadata field tokenizer.ggml.token_type: goes on for"),
    "array of strings": (b"tokenizer.ggml.tokens", 8, _u64(2**20), "field tokenizer.ggml.tokens: goes on for"),
    "length of a string": (b"tokenizer.ggml.model", 4, _u64(COUNT), "field tokenizer.ggml.model: goes on for"),
    "array of arrays": (b"tokenizer.ggml.tokens", 4, _u32(9), "tokenizer.ggml.tokens: type 9 is not read"),
    "number of dimensions": (b"blk.0.attn_q.weight", 0, _u32(2**31), "tensor blk.0.attn_q.weight: 2147483648 dim"),
    "dimension": (b"blk.0.attn_q.weight", 4, _u64(COUNT), "tensor blk.0.attn_q.weight: ends at byte"),
    "no rows": (b"blk.0.attn_q.weight", 4, _u64(0), "tensor blk.0.attn_k.weight: starts at byte"),
    "place": (b"blk.0.attn_q.weight", 24, _u64(2**64 - 32), "tensor blk.0.attn_q.weight: starts at byte"),
    "kind of a field": (b"llama.block_count", 0, _u32(6), "llama.block_count: need an integer, got 1.4"),
    "blocks": (b"llama.block_count", 4, _u32(10**6), "block_count: 1000000 blocks, but the file has 11 tensors"),
    "heads": (b"llama.attention.head_count", 4, _u32(0), "llama.attention.head_count: must be positive"),
    "end of text": (b"tokenizer.ggml.eos_token_id", 4, _u32(2**31), "eos_token_id: 2147483648 is none of"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_lies_is_named(tmp_path: Path, whole: bytes, lie: str) -> None:
    before, gap, replacement, named = LIES[lie]
    source = tmp_path / "model.gguf"
    source.write_bytes(_replaced(whole, whole.index(before) + len(before) + gap, replacement))
    found = _import(source)
    assert isinstance(found, str)
    assert named in found


def test_an_array_as_large_as_a_large_file_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Its elements would fit into the file, but not as many objects into memory."""
    start = whole.index(TYPE_FIELD) + len(TYPE_FIELD) + 8
    source = tmp_path / "model.gguf"
    with source.open("wb") as file:
        file.write(_replaced(whole, start, _u64(2**24)))
        file.truncate(2**28)  # a hole: takes no disk
    with pytest.raises(BadModel, match=r"tokenizer\.ggml\.token_type: 16777216 elements, at most"):
        require_whole(source)


def test_damage_is_said_before_a_file_is_read_for_its_digest(tmp_path: Path, whole: bytes) -> None:
    source, lines = tmp_path / "model.gguf", list[str]()
    source.write_bytes(whole[:-33])
    with pytest.raises(BadModel, match=r"tensor .*: ends at byte"):
        folder_for(source, tmp_path / "cache", lines.append)
    assert lines == []
    assert not (tmp_path / "cache").exists()
    source.write_bytes(whole)
    folder_for(source, tmp_path / "cache", lines.append)
    assert lines[0] == "checking model.gguf"


def _with_byte(whole: bytes, position: int, drawn: random.Random) -> bytes:
    """Another value at `position`: one bit flipped, or all, or zero."""
    value = whole[position]
    other = drawn.choice([value ^ 1 << drawn.randrange(8), value ^ 0xFF, 0 if value else 0xFF])
    return _replaced(whole, position, bytes([other]))


def _replaced(whole: bytes, start: int, replacement: bytes) -> bytes:
    return whole[:start] + replacement + whole[start + len(replacement) :]


def _structure(whole: bytes, data_start: int) -> list[int]:
    """Positions before the tensors, without most of the vocabulary's."""
    start = whole.index(b"tokenizer.ggml.tokens") + 100
    return [*range(start), *range(whole.index(TYPE_FIELD), data_start)]

"""Pre-tokenizers of GGUFs: pieces as the models' own tokenizers cut them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from engine.gguf_metadata import Metadata
from engine.gguf_tokenizer import LLAMA3_WORDS, QWEN2_WORDS, tokenizer, tokenizer_config
from engine.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from tests.engine.gguf_files import tokenizer_fields, write_gguf

TEXTS = (
    "Hello world, it's 12345 o'clock!",
    "I'LL SAY we'Ve  1234567 (x==y)\r\n\r\n  done\t\tnow   ",
    "    12 34\n\n\n   5",
    "def f(x):\n    return x**2  # größer, 日本語 テスト, ١٢٣, Ⅷ½",
    "e\u0301 vs \u00e9, \ufb01, \u1e9b\u0323",  # NFC changes some of them
    "a\u00a0b\u2003c\u3000d $+<=>^~|` ‘quote’ …",
    "🙂👩‍👩‍👧 http://x.y/z?q=1&r=%20",
)
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3", "Ġ Ġ", "ĠĠ Ġ", "r e", "Ã ©"]


def _metadata(path: Path, pre: str | None, **more: object) -> Metadata:
    fields = tokenizer_fields() | {"tokenizer.ggml.merges": MERGES} | more
    alphabet = list(BYTE_OF_CHARACTER)
    merged = [merge.replace(" ", "") for merge in MERGES]
    fields["tokenizer.ggml.tokens"] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *merged, "llhe"]
    fields["tokenizer.ggml.token_type"] = [3, 3, 3] + [1] * (len(alphabet) + len(merged) + 1)
    del fields["tokenizer.ggml.pre"]
    fields |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    return Metadata(write_gguf(path / "model.gguf", "qwen2", fields, {}))


def _pieces(made: tokenizers.Tokenizer, text: str) -> list[str]:
    decoded = (
        bytes(BYTE_OF_CHARACTER[character] for character in piece)
        for piece, _ in made.pre_tokenizer.pre_tokenize_str(text)
    )
    return [piece.decode() for piece in decoded]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen2_is_transformers(tmp_path: Path, text: str) -> None:
    metadata = _metadata(tmp_path, "qwen2")
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    reference = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES])
    made = tokenizer(metadata)
    assert made.encode(text).ids == reference.encode(text, add_special_tokens=False)
    assert made.decode(made.encode(text).ids) == reference.decode(reference.encode(text))


def test_llama3_pattern_is_transformers() -> None:
    assert TikTokenConverter().pattern == LLAMA3_WORDS
    assert LLAMA3_WORDS != QWEN2_WORDS


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["x", "=(", "I", "'ll", " 12345", "),", "  ", " IT", "'", "S", "\n\n"]),
        ("smollm", ["x", "=(", "I", "'ll", " ", "1", "2", "3", "4", "5", "),", "  ", " IT", "'", "S", "\n\n"]),
        ("llama-bpe", ["x", "=(", "I", "'ll", " ", "123", "45", "),", "  ", " IT", "'S", "\n\n"]),
        ("qwen2", ["x", "=(", "I", "'ll", " ", "1", "2", "3", "4", "5", "),", "  ", " IT", "'S", "\n\n"]),
        ("default", ["x", "=(", "I", "'", "ll", " ", "123", "45", "),", "  ", " IT", "'", "S", "\n\n"]),
        (None, ["x", "=(", "I", "'", "ll", " ", "123", "45", "),", "  ", " IT", "'", "S", "\n\n"]),
    ],
)
def test_pieces(tmp_path: Path, pre: str | None, pieces: list[str]) -> None:
    assert _pieces(tokenizer(_metadata(tmp_path, pre)), "x=(I'll 12345),   IT'S\n\n") == pieces


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"])
def test_every_text_comes_back(tmp_path: Path, pre: str) -> None:
    metadata = _metadata(tmp_path, pre)
    made = tokenizer(metadata)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    loaded = Tokenizer.load(tmp_path)
    for text in TEXTS:
        normal = made.normalizer.normalize_str(text) if made.normalizer else text
        ids = loaded.encode(text)
        assert loaded.decode(ids) == normal
        decoder = loaded.decoder()
        assert "".join(decoder.push([index]) for index in ids) + decoder.finish() == normal


def test_llama3_takes_whole_tokens_and_begins_with_bos(tmp_path: Path) -> None:
    """ "llhe" is a token that no merge makes."""
    metadata = _metadata(tmp_path, "llama-bpe")
    assert tokenizer(metadata).encode("llhe").tokens == ["llhe"]
    assert tokenizer_config(metadata, 64)["add_bos_token"] is True
    assert isinstance(tokenizer(metadata).model, BPE)
    other = _metadata(tmp_path, "qwen2")
    assert tokenizer(other).encode("llhe").tokens == ["ll", "he"]
    assert tokenizer_config(other, 64)["add_bos_token"] is False
    refused = _metadata(tmp_path, "llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    assert tokenizer_config(refused, 64)["add_bos_token"] is False

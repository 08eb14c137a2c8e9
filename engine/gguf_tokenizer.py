"""The tokenizer that a GGUF's metadata describes, as tokenizer.json and tokenizer_config.json.

Source of the pre-tokenizers: each model's own tokenizer.json where it has one, else llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from core.errors import BadModel
from engine.gguf_metadata import Metadata

CONTROL_TOKEN: Final = 3  # gguf's token types, from its TokenType
USER_DEFINED_TOKEN: Final = 4

# {digits}: how many digits make one piece.
WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS: Final = WORDS.replace("{digits}", "{1,3}")
QWEN2_WORDS: Final = WORDS.replace("{digits}", "")
GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
PUNCTUATION: Final = r"[\p{P}\$\+<=>\^~\|]+"
PATTERNS: Final = {
    "gpt-2": (GPT2_WORDS,),
    "llama-bpe": (LLAMA3_WORDS,),
    "qwen2": (QWEN2_WORDS,),
    "default": (PUNCTUATION, GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE from the vocabulary and merges.

    Raises: BadModel: another kind of tokenizer, or a pre-tokenizer that we do not know.
    """
    if metadata.need("tokenizer.ggml.model", str) != "gpt2":
        raise BadModel(f"{metadata.name}: tokenizer.ggml.model: only 'gpt2' (byte-level BPE) is supported")
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)
    types = metadata.need_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise BadModel(f"{metadata.name}: tokenizer.ggml.token_type: {len(types)} types of {len(tokens)} tokens")
    kind = _kind(metadata)
    vocab = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(metadata, vocab),
            ignore_merges=kind == "llama-bpe",  # a piece that is a token is that token, whatever the merges say
        )
    )
    made.pre_tokenizer = _pre_tokenizer(metadata, kind)
    made.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    special = [
        AddedToken(token, special=token_type == CONTROL_TOKEN, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
    ]
    made.add_tokens(special)
    return made


def tokenizer_config(metadata: Metadata, max_context_tokens: int) -> dict[str, Any]:
    """tokenizer_config.json: special tokens and the chat template."""
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)

    def token(field: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{field}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise BadModel(f"{metadata.name}: tokenizer.ggml.{field}_token_id: {index} is none of {len(tokens)} tokens")
        return None if index is None else tokens[index]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", bool, _kind(metadata) == "llama-bpe")),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "chat_template": metadata.get("tokenizer.chat_template", str),
    }


def _merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token. Raises: BadModel: one does not."""
    pairs = []
    for merge in metadata.need_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise BadModel(f"{metadata.name}: tokenizer.ggml.merges: {merge!r} does not make a token of two")
        pairs.append((left, right))
    return pairs


def _kind(metadata: Metadata) -> str:
    """The pre-tokenizer's name; without one llama.cpp takes its default, too."""
    return str(metadata.get("tokenizer.ggml.pre", str, "default"))


def _pre_tokenizer(metadata: Metadata, kind: str) -> pre_tokenizers.PreTokenizer:
    """Cuts by one pattern after another: what matches is a piece, and so is what lies between matches."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "smollm":  # transformers' own converter drops the digit split and gets "    12" wrong
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if kind not in PATTERNS:
        raise BadModel(f"{metadata.name}: tokenizer.ggml.pre: pre-tokenizer {kind!r} is not supported")
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[kind]]
    return pre_tokenizers.Sequence([*cuts, byte_level])

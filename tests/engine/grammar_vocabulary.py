"""A vocabulary of bytes, a few longer tokens and an end, beside ids that no token has: what grammars are tried on."""

from __future__ import annotations

from collections.abc import Callable

NAME = 257  # a special token, spelled like a text
END = 256
LONGER = {258: b'{"', 259: b'":', 260: b"ab", 261: b"\xc3\xa9", 262: "日".encode()[:2]}
WIDTH = 264  # of a row of logits


class SmallVocabulary:
    """Byte b is token b."""

    vocab_size = 263
    eos_token_ids = (END,)

    def spelling(self, token_id: int) -> bytes:
        if token_id < END:
            return bytes([token_id])
        return {**LONGER, END: b"<end>", NAME: b"<name>"}.get(token_id, b"")

    def special_token_ids(self) -> list[int]:
        return [END, NAME]

    def plain_encoder(self) -> Callable[[str], list[int]]:
        return lambda text: list(text.encode())


def allowed(mask: object) -> set[int]:
    """The tokens whose bits are set."""
    assert isinstance(mask, bytes), mask
    return {index for index in range(len(mask) * 8) if mask[index // 8] >> index % 8 & 1}

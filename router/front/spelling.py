"""Log probabilities as OpenAI's clients read them: with each token's bytes and its place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.request import TokenLogprobs
from router.front.intake import Tokenizer


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """A token by its bytes, which need not be whole characters; a special token's are its name's."""

    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class SpelledPosition:
    """One output position. `text_offset`: complete characters of the output's text before it."""

    drawn: SpelledToken
    top: tuple[SpelledToken, ...]
    text_offset: int


class Speller:
    """Spells the tokens of one output as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder()
        self._num_characters = 0

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[SpelledPosition]:
        """The next positions: of each its token and its log probabilities."""
        return [self._position(token_id, item) for token_id, item in zip(token_ids, logprobs, strict=True)]

    def _position(self, token_id: int, logprobs: TokenLogprobs) -> SpelledPosition:
        text_offset = self._num_characters
        self._num_characters += len(self._decoder.push((token_id,)))
        return SpelledPosition(
            drawn=SpelledToken(self._tokenizer.spelling(token_id), logprobs.drawn),
            top=tuple(SpelledToken(self._tokenizer.spelling(other), value) for other, value in logprobs.top),
            text_offset=text_offset,
        )

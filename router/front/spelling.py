"""Log probabilities as OpenAI's clients read them: with each token's bytes and its place in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.request import PromptLogprobs, TokenLogprobs
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SpelledToken:
    """A token by its bytes, which need not be whole characters; a special token's are its name's."""

    raw: bytes
    logprob: float | None  # None: of a prompt's first token, which nothing comes before


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

    def push_prompt(self, token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int) -> list[SpelledPosition]:
        """The positions of a prompt, which the output's continue; `num_top` alternatives of each but the first."""
        rest = [
            TokenLogprobs(logprob, logprobs.top(index)[:num_top]) for index, logprob in enumerate(logprobs.logprobs)
        ]
        return [self._position(token_ids[0], None), *self.push(token_ids[1:], rest)]

    def prompt_objects(self, token_ids: Sequence[int], logprobs: PromptLogprobs, num_top: int) -> list[Any]:
        """vLLM's `prompt_logprobs`: of each token, by its id, the log probability, its rank and its text; and of the
        best `num_top`. The first has none."""
        found: list[Any] = [None]
        for index, token_id in enumerate(token_ids[1:]):
            entry = {str(token_id): self._object(token_id, logprobs.logprobs[index], logprobs.ranks[index])}
            for rank, (other, logprob) in enumerate(logprobs.top(index)[:num_top], 1):
                entry.setdefault(str(other), self._object(other, logprob, rank))
            found.append(entry)
        return found

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a whole prompt."""
        decoder = self._tokenizer.decoder()
        return decoder.push(token_ids) + decoder.finish()

    def _object(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._tokenizer.spelling(token_id).decode("utf-8", errors="replace")
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    def _position(self, token_id: int, logprobs: TokenLogprobs | None) -> SpelledPosition:
        text_offset = self._num_characters
        self._num_characters += len(self._decoder.push((token_id,)))
        spelling = self._tokenizer.spelling
        return SpelledPosition(
            drawn=SpelledToken(spelling(token_id), logprobs.drawn if logprobs else None),
            top=tuple(SpelledToken(spelling(other), value) for other, value in logprobs.top) if logprobs else (),
            text_offset=text_offset,
        )

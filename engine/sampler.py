"""Draws one token per row. The result of a row is a function of its logits and its spec, never of the other rows.

The random number is a hash of (seed, position), not the next of a stream, so a token does not depend on the batch,
the worker, preemption or migration. The draw inverts the cumulative distribution, in float64 and in order of token
ids, over the tokens that the filters keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from core.errors import InvariantBroken
from core.request import TokenLogprobs
from engine.step import (
    NOT_FINITE,
    Answer,
    DeadEnd,
    Drawn,
    GrammarMatcher,
    PromptScore,
    RowSpec,
    SampleSpec,
    ScoredToken,
    ScoreSpec,
)

LARGEST: Final = torch.finfo(torch.float32).max
SORTED_PREFIX: Final = 1024  # top_p mostly keeps fewer tokens; only where it keeps more is the whole row sorted
MASK_64: Final = (1 << 64) - 1
GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
# What a byte of a mask adds to eight logits: 0 for a bit that is set, else minus infinity.
BIT_FLOORS: Final = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1, 0, -np.inf
).astype(np.float32)


def draw(logits: torch.Tensor, specs: Sequence[RowSpec]) -> list[Answer]:
    """`sample`, with log probabilities for the specs that ask for them; and the scores of prompt tokens.

    Args, Raises: see `sample`.
    """
    samples = [spec for spec in specs if isinstance(spec, SampleSpec)]
    if len(samples) == len(specs):
        return [*_draw_scored(logits, samples)]
    rows = [row for row, spec in enumerate(specs) if isinstance(spec, SampleSpec)]
    drawn = iter(_draw_scored(logits[rows], samples) if rows else ())
    return [_score(logits[row], spec) if isinstance(spec, ScoreSpec) else next(drawn) for row, spec in enumerate(specs)]


def _draw_scored(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Drawn]:
    return [
        drawn
        if isinstance(drawn, DeadEnd) or spec.sampling.top_logprobs is None
        else _scored(logits[row], drawn, spec.sampling.top_logprobs)
        for row, (drawn, spec) in enumerate(zip(sample(logits, specs), specs, strict=True))
    ]


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | DeadEnd]:
    """Draw a token for each row.

    In this order, as vLLM has it:
    1. logit_bias is added; 2. repetition_penalty; 3. frequency_penalty and presence_penalty;
    4. what the grammar does not allow, and banned ids, drop out. Bans give way where a grammar leaves nothing else.
    5. Greedy choice ends here. Else temperature;
    6. min_p, top_k (of what min_p kept), top_p (over what both kept, renormalised; the token that crosses it is kept).
    Among equal logits the lower id comes first, in greedy choice too.

    Args:
        logits: [num_rows, vocab_size], float32; not changed.
        specs: one per row; their token ids lie in the vocabulary.
    Returns: for each row a token, or why its grammar leaves none, or NOT_FINITE.
    Raises: InvariantBroken: a row has bans on all its tokens.
    """
    best, greedy_ids = logits.max(dim=-1)
    is_finite = torch.isfinite(best).tolist()
    if not all(is_finite):
        rows = [row for row, finite in enumerate(is_finite) if finite]
        others = iter(sample(logits[rows], [specs[row] for row in rows]) if rows else ())
        return [next(others) if finite else NOT_FINITE for finite in is_finite]
    dead: dict[int, DeadEnd] = {}
    if any(spec.changes_logits for spec in specs):
        logits, dead = _changed(logits, specs)
        best, greedy_ids = logits.max(dim=-1)
        if not bool(torch.isfinite(best).all()):
            raise InvariantBroken("every token is banned")
    drawn: list[int | DeadEnd] = greedy_ids.tolist()
    random_rows = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0.0]
    if random_rows:
        tokens = _draw(logits[random_rows], [specs[row] for row in random_rows])
        for row, token in zip(random_rows, tokens, strict=True):
            drawn[row] = token
    for row, end in dead.items():
        drawn[row] = end
    return drawn


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) with 53 random bits, from (seed, position) alone.

    Source: SplitMix64 (Steele, Lea, Flood 2014): the position steps the state that the mixed seed starts.
    """
    bits = _mix(_mix(seed) + (position + 1) * GOLDEN_GAMMA) >> 11
    return (bits + 0.5) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's output function on 64 bits."""
    value = (value + GOLDEN_GAMMA) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _scored(logits: torch.Tensor, token_id: int, num_top: int) -> ScoredToken:
    """The log probabilities of one row, [vocab_size], float32: of the token drawn, and of the best `num_top`."""
    logprobs = logits.double().log_softmax(dim=0)
    return ScoredToken(token_id, TokenLogprobs(float(logprobs[token_id]), _top(logprobs, num_top)))


def _score(logits: torch.Tensor, spec: ScoreSpec) -> PromptScore | DeadEnd:
    """One prompt token by the row, [vocab_size], float32, that says what follows. Ranks are as vLLM has them."""
    if not bool(torch.isfinite(logits.max())):
        return NOT_FINITE
    logprobs = logits.double().log_softmax(dim=0)
    own = logprobs[spec.token_id]
    return PromptScore(float(own), int((logprobs >= own).sum()), _top(logprobs, spec.num_top))


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The best of one row, [vocab_size], float64: (token id, log probability)."""
    if not count:
        return ()
    least = logprobs.topk(min(count, len(logprobs))).values[-1]
    candidates = (logprobs >= least).nonzero().squeeze(-1)  # lowest id first, which a stable sort keeps
    best = candidates[logprobs[candidates].sort(descending=True, stable=True).indices[:count]]
    return tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))


def _changed(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> tuple[torch.Tensor, dict[int, DeadEnd]]:
    """A copy in which biases, penalties, grammars and bans are applied; and the rows whose grammar is at an end."""
    changed = logits.clone()
    for row, spec in zip(changed, specs, strict=True):
        sampling = spec.sampling
        if sampling.logit_bias:
            token_ids, biases = zip(*sampling.logit_bias, strict=True)
            row[list(token_ids)] += torch.tensor(biases)
        if sampling.has_penalties:
            _penalise(row, spec)
    dead = _constrain(changed, specs)
    for row, spec in zip(changed, specs, strict=True):
        if spec.banned_token_ids:
            banned = list(spec.banned_token_ids)
            values = row[banned]
            row[banned] = -torch.inf
            if spec.grammar is not None and bool(row.max() == -torch.inf):
                row[banned] = values
    return changed, dead


def _constrain(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> dict[int, DeadEnd]:
    """Leave of each row, [vocab_size], what its grammar allows, in place. Returns the rows of which that is nothing."""
    masks = {row: _mask(spec.grammar) for row, spec in enumerate(specs) if spec.grammar is not None}
    dead = {row: mask for row, mask in masks.items() if isinstance(mask, DeadEnd)}
    live = {row: mask for row, mask in masks.items() if not isinstance(mask, DeadEnd)}
    if live:
        packed = np.frombuffer(b"".join(live.values()), np.uint8).reshape(len(live), -1)
        floors = torch.from_numpy(np.take(BIT_FLOORS, packed, axis=0).reshape(len(live), -1))
        rows = torch.tensor(list(live), device=logits.device)
        logits.index_add_(0, rows, floors[:, : logits.shape[1]].to(logits.device))
    return dead


def _mask(grammar: GrammarMatcher) -> bytes | DeadEnd:
    mask = grammar.mask()
    if isinstance(mask, bytes) and not any(mask):
        return DeadEnd("the grammar has come to a dead end: no token of the vocabulary continues it")
    return mask


def _penalise(row: torch.Tensor, spec: SampleSpec) -> None:
    """Apply the penalties to one row, [vocab_size], float32, in place.

    Source: repetition_penalty: CTRL, arXiv:1909.05858, section 4.1, for negative logits as transformers and vLLM have
        it; the others: OpenAI's API reference.
    """
    sampling = spec.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(spec.prompt_token_ids + spec.output_token_ids)  # a repeated id gets the same value twice
        values, penalty = row[seen].double(), sampling.repetition_penalty
        # Bounded: an extreme penalty must leave a token the best or the worst, not make it infinite.
        row[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(-LARGEST, LARGEST).float()
    if spec.output_token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = torch.tensor(spec.output_token_ids).bincount(minlength=len(row))
        row -= counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Invert the cumulative distribution of each row, [num_rows, vocab_size], float32; temperatures are above 0."""
    temperatures = torch.tensor([spec.sampling.temperature for spec in specs], dtype=torch.float64)
    # The best token's weight is exp(0) = 1 whatever the temperature: a tiny one cannot overflow.
    scaled = ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperatures.unsqueeze(-1)).exp_()
    weights = _filter(scaled, specs)
    cumulative = weights.cumsum(dim=-1)
    numbers = [uniform(spec.sampling.seed, spec.position) for spec in specs]
    targets = torch.tensor(numbers, dtype=torch.float64) * cumulative[:, -1]
    # First token whose cumulative weight exceeds the target: a token of weight 0 is never the first.
    picks = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
    return [int(pick) for pick in picks]


def _filter(weights: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Zero the weights, [num_rows, vocab_size], float64, that min_p, top_k and top_p drop. The best weight is 1.

    Source: min_p: arXiv:2407.01082.
    """
    for row, spec in enumerate(specs):
        if spec.sampling.min_p:
            weights[row] *= weights[row] >= spec.sampling.min_p
        if spec.sampling.top_k or spec.sampling.top_p < 1.0:
            weights[row] *= _kept(weights[row], spec.sampling.top_k, spec.sampling.top_p)
    return weights


def _kept(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Which tokens of one row, [vocab_size], float64, stay: bool, at least one."""
    vocab_size = len(weights)
    most = min(top_k or vocab_size, vocab_size)
    width = min(max(SORTED_PREFIX, top_k), vocab_size)
    while True:
        descending = weights.topk(width).values
        cumulative = descending[:most].cumsum(dim=0)
        total = cumulative[-1] if most <= width else weights.cumsum(dim=0)[-1]
        count = int((cumulative < top_p * total).sum()) + 1
        if count <= len(cumulative) or width == vocab_size:
            break
        width = vocab_size
    count = min(count, most)
    least = descending[count - 1]
    ties = weights == least
    num_ties_kept = count - int((descending[:count] > least).sum())
    return (weights > least) | (ties & (ties.cumsum(dim=0) <= num_ties_kept))

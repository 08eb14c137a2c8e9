"""What the router is told of a drawn token."""

from __future__ import annotations

from core.request import TokenDelta, WorkUsage
from engine.sequence import Sequence
from engine.step import DeadEnd, Drawn, ScoredToken


def add_drawn(sequence: Sequence, drawn: Drawn) -> TokenDelta:
    """Add what was drawn to its sequence. Returns: what is new of that choice; the first time, what it has cost."""
    if isinstance(drawn, DeadEnd):
        return TokenDelta(
            request_id=sequence.request_id,
            position=sequence.num_output,
            token_ids=(),
            finish_reason=drawn.reason,
            message=drawn.message,
            choice=sequence.choice,
        )
    token_id, logprobs = (drawn.token_id, (drawn.logprobs,)) if isinstance(drawn, ScoredToken) else (drawn, ())
    reason, matched = sequence.append(token_id)
    return TokenDelta(
        request_id=sequence.request_id,
        position=sequence.num_output - 1,
        token_ids=(token_id,),
        finish_reason=reason,
        matched_stop=matched,
        usage=_first_usage(sequence),
        logprobs=logprobs,
        choice=sequence.choice,
        prompt_logprobs=sequence.tell_scores(),
    )


def _first_usage(sequence: Sequence) -> WorkUsage | None:
    if sequence.usage_sent:
        return None
    sequence.usage_sent = True
    return WorkUsage(cached_tokens=sequence.num_cached_prompt, computed_tokens=sequence.num_computed_prompt)

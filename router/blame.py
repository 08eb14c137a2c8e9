"""Whose requests a worker may have died of.

Before each step a worker says which prompts are in it, and waits until that is written; and of all others, once they
wait in its line (core.messages.StepOutput). So three kinds of what was out there are told apart:
1. It was computed: streams, and the prompts of the latest step. Any of these may have ended it.
2. It waited in line. It did nothing, however long it was there, and whoever overtook it.
3. It is not known: just sent, or before the line, as a grammar that is compiled or a prefix that a peer pushes. It may
   have ended the worker too. Where others were computed that is less likely; then it gets a share of the blame, so that
   one that is there each time ends, and those who only come and go with one that kills do not end before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Final

from core.membership import WorkerRef
from router.admission.room import LEAST_PROMPTS
from router.flow import Leg

UNKNOWN_SHARE: Final = 0.5


def shares_of_blame(
    worker: WorkerRef, legs: Iterable[Leg], computing: Collection[str] | None, tokens_ahead: int
) -> dict[Leg, float]:
    """Of those that may have ended it, in (0, 1]. computing: attempts in its latest step; None: it did not say."""
    there = [leg for leg in legs if leg.is_computed_on(worker)]
    if computing is None:
        return dict.fromkeys(_guess(there, tokens_ahead), 1.0)
    shares = {leg: 1.0 for leg in there if leg.has_new_tokens or leg.request.request_id in computing}
    unknown_share = UNKNOWN_SHARE if shares else 1.0
    return {leg: unknown_share for leg in there if not leg.in_line} | shares


def _guess(there: Iterable[Leg], tokens_ahead: int) -> list[Leg]:
    """Of a worker of an earlier release: streams, and of its prompts those that it can have begun, which ordinarily is
    all that are out there (router/admission/room.py), in the order in which they were sent."""
    guessed = []
    # By priority, prompts and tokens: batch work may have begun before others came.
    begun: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for leg in sorted(there, key=lambda leg: leg.prefill_begun_s):
        num_prompts, ahead = begun[leg.request.priority]
        if leg.has_new_tokens:
            guessed.append(leg)
        elif ahead < tokens_ahead or num_prompts < LEAST_PROMPTS:
            guessed.append(leg)
            begun[leg.request.priority] = num_prompts + 1, ahead + leg.computed_tokens
    return guessed

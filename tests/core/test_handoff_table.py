"""The hand-off table: what is listed is followed, what is not is a bug."""

import itertools

import pytest

from core.errors import InvariantBroken
from core.handoff import NEXT, HandoffEvent, HandoffState, next_state

ALL_PAIRS = list(itertools.product(HandoffState, HandoffEvent))


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL_PAIRS if pair in NEXT])
def test_listed_pairs_are_followed(state: HandoffState, event: HandoffEvent) -> None:
    assert next_state("h", state, event) is NEXT[state, event]


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL_PAIRS if pair not in NEXT])
def test_every_other_pair_is_a_bug_that_names_state_event_and_id(state: HandoffState, event: HandoffEvent) -> None:
    with pytest.raises(InvariantBroken, match=f"h-7: {event} in state {state}"):
        next_state("h-7", state, event)


END_STATES = {HandoffState.RELEASED, HandoffState.ABORTED}


def test_every_state_can_end_and_ends_stay_ended() -> None:
    for state in HandoffState:
        reachable, frontier = {state}, [state]
        while frontier:
            here = frontier.pop()
            for (before, _event), after in NEXT.items():
                if before is here and after not in reachable:
                    reachable.add(after)
                    frontier.append(after)
        assert reachable & END_STATES
        if state in END_STATES:
            assert reachable == {state}


def test_blocks_that_a_write_may_reach_are_only_freed_through_verified_or_quiet() -> None:
    ways_out = {(event, after) for (before, event), after in NEXT.items() if before is HandoffState.MOVING}
    assert ways_out == {
        (HandoffEvent.VERIFIED, HandoffState.LANDED),
        (HandoffEvent.CANCELLED, HandoffState.STOPPING),
    }

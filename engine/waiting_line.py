"""Who waits for room, and who of them is next.

A sequence's rank is (due step, number, choice): it comes due `priority` * `ageing_steps` steps after it arrived, so a
later priority is worth a longer wait and nothing more. Of two sequences the one that is due first goes first; for
each there is a step after which no newcomer can be due before it, so none starves.
A sequence that is not due yet is batch work: it gets what the due ones leave. The steps that compute for it do not
bring it nearer, so it is passed over in at most `priority` * `ageing_steps` steps in all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.sequence import Sequence


def rank(sequence: Sequence) -> tuple[int, int, int]:
    """Lower goes first, and is preempted last. No two sequences have the same."""
    return sequence.due_step, sequence.number, sequence.choice


class WaitingLine:
    """Sequences in order of rank. A head that finds no room may be overtaken, but not without end."""

    def __init__(self, scan_depth: int, max_overtakes: int) -> None:
        self._scan_depth = scan_depth
        self._max_overtakes = max_overtakes
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def before(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those who go before `sequence`, whether or not it waits here."""
        return iter(self._line[: bisect_left(self._line, rank(sequence), key=rank)])

    def push(self, sequence: Sequence) -> None:
        insort(self._line, sequence, key=rank)

    def remove(self, sequence: Sequence) -> bool:
        """False: it does not wait here."""
        index = bisect_left(self._line, rank(sequence), key=rank)
        found = index < len(self._line) and self._line[index] is sequence
        if found:
            del self._line[index]
        return found

    def may_gather(self, step: int, delay_steps: int, enough_tokens: int) -> bool:
        """Whether those who wait may wait for more of their kind, to be computed with: none of them came `delay_steps`
        steps ago or earlier, and together they have fewer than `enough_tokens` tokens."""
        young = all(step - sequence.arrived_step < delay_steps for sequence in self._line)
        return young and sum(sequence.num_known for sequence in self._line) < enough_tokens

    def admit(self, step: int, *, due: bool, take: Callable[[Sequence], bool]) -> None:
        """Remove the first one that `take` finds room for, if there is one.

        due: admit the ones that are due, or else batch work, which goes only when no due one waits. Past the head at
        most `scan_depth` are tried, of the same kind, until the head has been overtaken `max_overtakes` times.
        """
        if not self._line or self._line[0].is_due(step) is not due:
            return
        head = self._line[0]
        depth = self._scan_depth if head.num_overtaken < self._max_overtakes else 0
        for index, sequence in enumerate(self._line[: depth + 1]):
            if sequence.is_due(step) is not due:
                return
            if take(sequence):
                self.remove(sequence)  # `take` may have pushed others in
                head.num_overtaken = head.num_overtaken + 1 if index else 0
                return

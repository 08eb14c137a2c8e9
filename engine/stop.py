"""Stop strings in a stream of text: nothing that could still become one is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """text: what may be shown now. matched: the stop string that was found; the generation ends after `text`."""

    text: str
    matched: str | None = None


class StopStrings:
    """Watches the text of one generation.

    The stop string that is complete first, character by character, ends it; of several that are complete at the same
    character, the longest. So the result does not depend on how the text is cut into pushes, and no match ever waits
    for text that may not come. Text before the match is shown; the match and what follows are not.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops: none of them empty; may be none at all."""
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take the next text; not to be called after a match."""
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _, start, matched = min(matches)
            self._held = ""
            return StopResult(text[:start], matched)
        shown = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[shown:]
        return StopResult(text[:shown])

    def finish(self) -> str:
        """The text held back, when the generation ends otherwise."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, which `text` does not contain."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop import StopResult, StopStrings


def _naive(text: str, stops: tuple[str, ...]) -> StopResult:
    """Character by character: the first place where the text ends in a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        matched = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if matched is not None:
            return StopResult(text[: end - len(matched)], matched)
    return StopResult(text)


def _streamed(pieces: list[str], stops: tuple[str, ...]) -> StopResult:
    watch = StopStrings(stops)
    shown = ""
    for piece in pieces:
        result = watch.push(piece)
        shown += result.text
        if result.matched is not None:
            return StopResult(shown, result.matched)
    return StopResult(shown + watch.finish())


SHORT_TEXT = st.text("ab\n", min_size=1, max_size=4)


@given(pieces=st.lists(st.text("ab\n", max_size=5), max_size=8), stops=st.lists(SHORT_TEXT, max_size=4).map(tuple))
def test_any_cut_gives_what_the_whole_text_gives(pieces: list[str], stops: tuple[str, ...]) -> None:
    assert _streamed(pieces, stops) == _naive("".join(pieces), stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("END",), ["text E", "ND more"], StopResult("text ", "END")),
        (("END",), ["text E", "Nope"], StopResult("text ENope")),
        (("END",), ["text EN"], StopResult("text EN")),
        (("abcd", "bc"), ["xabcd"], StopResult("xa", "bc")),  # complete first
        (("bc", "abc"), ["xabc"], StopResult("x", "abc")),  # complete together: the longest
        ((), ["text"], StopResult("text")),
        (("aab",), ["aa", "ab"], StopResult("a", "aab")),
    ],
)
def test_examples(stops: tuple[str, ...], pieces: list[str], expected: StopResult) -> None:
    assert _streamed(pieces, stops) == expected


def test_only_what_could_become_a_stop_is_held() -> None:
    watch = StopStrings(("\n\nUser:",))
    assert watch.push("line\n") == StopResult("line")
    assert watch.push("\nUs") == StopResult("")
    assert watch.push("age") == StopResult("\n\nUsage")
    assert watch.finish() == ""

"""Stop strings: the result does not depend on how the text was cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.streams.output import StopStrings

letters = st.text("ab", max_size=40)


def cut(text: str, stops: list[str]) -> str:
    """The specification: up to the match that ends first, the longest of those."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.data())
def test_pieces_make_what_the_whole_text_makes(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    filter_ = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += filter_.feed(piece)
        assert cut(text, stops).startswith(shown)
    assert shown + filter_.flush() == cut(text, stops)
    assert bool(filter_.matched) == any(stop in text for stop in stops)


@given(letters, st.text("ab", min_size=1, max_size=5))
def test_one_stop_string_is_str_find(text: str, stop: str) -> None:
    filter_ = StopStrings([stop])
    shown = "".join(filter_.feed(char) for char in text) + filter_.flush()
    at = text.find(stop)
    assert shown == (text if at < 0 else text[:at])


def test_only_what_may_become_a_match_is_held() -> None:
    filter_ = StopStrings(["User:"])
    assert filter_.feed("The Us") == "The "
    assert filter_.feed("A") == "UsA"


def test_after_a_match_nothing_comes() -> None:
    filter_ = StopStrings(["x"])
    assert filter_.feed("axb") == "a"
    assert filter_.feed("c") == ""
    assert filter_.flush() == ""


def test_an_empty_stop_string_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""])

"""The input of a custom tool is the text that the model has put into JSON, however that came."""

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from services.gateway.tool_calls.custom_input import CustomInput

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def fed(whole: str, cuts: list[int]) -> str:
    reader, edges = CustomInput(), sorted({min(cut, len(whole)) for cut in cuts} | {0, len(whole)})
    return "".join(reader.feed(whole[begin:end]) for begin, end in pairwise(edges))


@given(
    TEXTS, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]), st.lists(st.integers(0, 300))
)
@example('a"\\/\b\f\n\r\t\x01é😀', True, (", ", ": "), list(range(100)))
def test_the_text_is_given_whole(text: str, ascii_only: bool, separators: tuple[str, str], cuts: list[int]) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only, separators=separators)
    assert fed(written, cuts) == text
    assert fed(f"\n{written}\n", cuts) == text


@given(
    st.sampled_from(['{"code": "x"}', "print(1)", "[1]", '{"input": 3}', '{"inputs": "x"}']),
    st.lists(st.integers(0, 20)),
)
def test_anything_else_is_given_as_it_is(written: str, cuts: list[int]) -> None:
    assert fed(written, cuts) == written


def test_escapes_that_are_none_are_given_as_they_are() -> None:
    assert fed(r'{"input": "\q\uzzzz\ud83dx\/"}', [13, 15, 20]) == "\\q\\uzzzz\ufffdx/"

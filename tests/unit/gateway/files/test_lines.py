"""Lines come out as they went in, however the bytes were cut."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.files.lines import BOM, FileLine, LineSplitter

texts = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=30)
contents = st.one_of(texts.map(str.encode), st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"")))
ends = st.sampled_from([b"\n", b"\r\n"])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in parts, some of them empty."""
    marks = sorted(min(place, len(data)) for place in places)
    return [data[begin:end] for begin, end in zip([0, *marks], [*marks, len(data)], strict=True)]


def split(parts: list[bytes], limit: int = 1000) -> list[FileLine]:
    splitter = LineSplitter(limit)
    found = [line for part in parts for line in splitter.feed(part)]
    return found + splitter.end()


def expected(data: bytes, limit: int) -> list[FileLine]:
    """By the plainest means, of the whole."""
    lines = []
    for number, each in enumerate(data.removeprefix(BOM).split(b"\n"), 1):
        text = each.removesuffix(b"\r")
        if len(text) > limit:
            lines.append(FileLine(number, b"", "too_long"))
        elif text.strip():
            try:
                text.decode()
            except UnicodeDecodeError:
                lines.append(FileLine(number, b"", "not_utf8"))
            else:
                lines.append(FileLine(number, text, ""))
    return lines


@given(
    st.lists(st.tuples(contents, ends), max_size=8),
    contents,
    st.booleans(),
    st.lists(st.integers(0, 300), max_size=12),
    st.integers(1, 40),
)
def test_any_cutting_gives_the_same_lines(
    lines: list[tuple[bytes, bytes]], last: bytes, mark: bool, places: list[int], limit: int
) -> None:
    data = (BOM if mark else b"") + b"".join(text + end for text, end in lines) + last
    if not mark and data.startswith(BOM):
        return
    assert split(cut(data, places), limit) == expected(data, limit)
    assert split([data[index : index + 1] for index in range(len(data))], limit) == expected(data, limit)


def test_numbers_count_blank_lines() -> None:
    assert split([b"\n a \r\n\r\nb"]) == [FileLine(2, b" a ", ""), FileLine(4, b"b", "")]


def test_an_endless_line_is_not_kept() -> None:
    splitter = LineSplitter(100)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._held) <= 1200
    assert splitter.feed(b"\nshort\n") == [FileLine(1, b"", "too_long"), FileLine(2, b"short", "")]
    assert splitter.end() == []

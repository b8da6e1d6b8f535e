"""What comes out on a terminal, and where there is none."""

import io
import itertools
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from services.cli.ui import AnswerPrinter, LoadBars, WordWrap, model_bars, print_columns
from shared.messages import GroupBeat, GroupLoad, Heartbeat

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=10), max_size=40)


def screen(width: int = 20, *, terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, emoji=False, legacy_windows=False)


def output(console: Console) -> str:
    """What was printed, without what only colours and moves the cursor."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


@given(words=WORDS, cuts=st.lists(st.integers(0, 400), max_size=20))
def test_lines_break_between_words_however_the_text_comes(words: list[str], cuts: list[int]) -> None:
    text = " ".join(words)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    wrap = WordWrap(20)
    printed = "".join(wrap.feed(text[a:b]) for a, b in itertools.pairwise(edges)) + wrap.end()
    assert printed.split() == words
    assert all(len(line) <= 20 for line in printed.split("\n"))
    assert all(len(line) + 1 + len(after.split()[0]) > 20 for line, after in _neighbours(printed)), "no early break"


def _neighbours(text: str) -> list[tuple[str, str]]:
    lines = text.split("\n")
    return list(itertools.pairwise(lines))


def test_lines_and_indents_of_the_answer_are_kept() -> None:
    wrap = WordWrap(20)
    text = "def f():\n    return 1\n\n- one\n- two  \n"
    assert wrap.feed(text) + wrap.end() == text.replace("  \n", "\n")


def test_wide_characters_need_no_spaces() -> None:
    wrap = WordWrap(10)
    printed = wrap.feed("\u4f60\u597d" * 6) + wrap.end()
    assert [cell_len(line) for line in printed.split("\n")] == [10, 10, 4]


def test_an_answer_is_printed_as_it_is_and_cannot_steer_the_terminal() -> None:
    for terminal in (True, False):
        console = screen(80, terminal=terminal)
        printer = AnswerPrinter(console)
        for piece in ("a :smi", "le: [bold]b", "[/] \x1b[2J\x07c\r"):
            printer.write(piece)
        printer.end()
        assert output(console) == "a :smile: [bold]b[/] [2Jc\n"


def test_columns_are_never_cut() -> None:
    console = screen(20)
    print_columns(console, [("what", "pid", "where"), ("x", "12345", "a" * 60)], right=(1,))
    assert output(console) == f"what    pid  where\nx     12345  {'a' * 60}\n"


def beat(message: str, state: str = "starting") -> dict[str, Heartbeat]:
    group = GroupBeat("group-0", "m", 1, state, [], GroupLoad(), loaded=0.5, message=message)  # type: ignore[arg-type]
    service = "ready" if state == "ready" else "starting"
    return {"executor-0": Heartbeat("executor", "executor-0", 1, service, group=group)}  # type: ignore[arg-type]


def test_why_a_ring_does_not_come_up_is_shown() -> None:
    reason = "rank 1 was killed [9]; look into its log and at the memory that the model needs"
    console = screen(80)
    with LoadBars(console) as bars:
        bars.update(beat(""))
        bars.update(beat(reason))
    shown = output(console)
    for word in reason.split():
        assert word in shown
    pipe = screen(80, terminal=False)
    with LoadBars(pipe) as bars:
        for _ in range(3):
            bars.update(beat(reason))
        bars.update(beat(reason, "ready"))
    assert output(pipe) == f"executor-0: {reason}\nexecutor-0: ready\n"


def test_each_stage_of_a_model_is_a_bar_or_a_line() -> None:
    pipe = screen(80, terminal=False)
    with model_bars(pipe) as report:
        for done in (0, 50, 100):
            report("downloading", done, 100)
        report("weights", 1, 4)
    assert output(pipe) == "model: downloading ...\nmodel: weights ...\n"
    console = screen(80)
    with model_bars(console) as report:
        report("downloading", 50, 100)
        report("weights", 1, 4)
    last = output(console).splitlines()[-2:]
    assert "100/100 bytes" in last[0]
    assert "4" not in last[1].replace("0:00:00", "")

"""When a question counts as answered, and when one way is behind another."""

import pytest

from tests.e2e.everyday_questions import Question, Texts, read_questions


@pytest.mark.parametrize(
    ("text", "right"),
    [("It is paris.", True), ("In Paris, France", True), ("parish", False), ("The 12th", False), ("12!", True)],
)
def test_a_question_is_answered_by_a_word_of_its_own(text: str, right: bool) -> None:
    assert Question("?", ["Paris", "12"]).is_answered(text) is right


def test_behind_is_what_another_way_answers_and_this_one_does_not() -> None:
    questions = [Question("a", ["yes"]), Question("b", ["yes"]), Question("c", ["yes"])]
    first = Texts(["yes", "yes", "no"], [["yes", "yes", "no"]] * 3).right(questions)
    other = Texts(["yes", "no", "yes"], [["yes", "yes", "no"], ["yes", "no", "no"], ["yes"] * 3]).right(questions)
    assert other.sampled == [True, False, True], "more than half of the texts"
    assert other.behind(first) == (1, 1)
    assert first.behind(first) == (0, 0)


def test_no_question_is_asked_twice() -> None:
    asked = [one.question for one in read_questions()]
    assert len({*asked}) == len(asked) == 40

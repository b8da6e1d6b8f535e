"""What a file of examples comes to: tokens, counts, faults, and what `auto` stands for."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.fine_tuning.dataset import Dataset, batch_size_for, chosen, epochs_for
from services.gateway.intake.fine_tuning.faults import MAX_FAULTS, Faults, sentence
from services.gateway.tokenizer.turns import TrainedTokens
from services.gateway.training.preparation import tokenized, validation_events
from services.gateway.training.tokenization import TokenizedFile
from shared.messages.training import Hyperparameters, TrainingJob, steps_of

TEXTS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=12)


def text(tokens: list[int], trained: int = 1) -> TrainedTokens:
    """The last `trained` tokens are."""
    return TrainedTokens(tokens, bytes(len(tokens) - trained) + b"\1" * trained)


@given(lines=st.lists(TEXTS, max_size=8), most=st.integers(2, 12), truncate=st.booleans())
def test_examples_lie_end_to_end(lines: list[list[tuple[int, bool]]], most: int, truncate: bool) -> None:
    """What is kept is what hosts read, whatever was refused on the way; no example is longer than it may be."""
    data = Dataset("supervised", most, 0, truncate=truncate)
    kept: list[TrainedTokens] = []
    for number, line in enumerate(lines):
        whole = TrainedTokens([token for token, _ in line], bytes(weight for _, weight in line))
        too_long = len(whole.tokens) > most and not truncate
        if too_long or not any(whole.weights[:most]):
            with pytest.raises(InvalidParameter) as refused:
                data.add(b"%d" % number, [whole])
            assert refused.value.reason == ("example_too_long" if too_long else "no_trained_tokens")
        else:
            data.add(b"%d" % number, [whole])
            kept.append(TrainedTokens(whole.tokens[:most], whole.weights[:most]))
    packed = data.packed()
    assert list(array("I", packed.lengths)) == [len(one.tokens) for one in kept]
    assert list(array("i", packed.tokens)) == [token for one in kept for token in one.tokens]
    assert packed.weights == b"".join(one.weights for one in kept)
    assert (data.lines, data.examples, data.tokens) == (len(kept), len(kept), len(packed.weights))
    assert data.trained == sum(packed.weights)
    assert data.longest == max((len(one.tokens) for one in kept), default=0)


def test_of_several_texts_those_are_kept_that_have_something_to_learn() -> None:
    data = Dataset("supervised", 4, 0, truncate=True)
    data.add(b"1", [text([1, 2, 3]), text([1, 2, 3, 4, 5])], "<think>")
    assert (data.lines, data.examples, data.cut, data.unlike_prompt) == (1, 1, 1, "<think>")
    data.add(b"1", [text([1, 2])])
    assert data.repeated == 1


def test_what_may_not_be_meant_is_told() -> None:
    job = TrainingJob("ftjob-1", "", 0.0, "m", "supervised", "file-1", "o", 1, validation_file="file-2")
    apart = Dataset("supervised", 8, 0, truncate=False)
    for line in (b"1", b"1"):
        apart.add(line, [text([1, 2, 3]), text([1, 2, 3])], "<think>\n")
    files = [TokenizedFile(apart, Faults("training_file")), TokenizedFile(apart, Faults("validation_file"))]
    counts = tokenized(job, [apart, apart])
    assert (counts.examples, counts.trained, counts.longest, counts.validation_tokens) == (4, 4, 3, 12)
    events = validation_events(job, files, counts)
    assert len({event.kind for event in events}) == len(events) == 8
    messages = [event.message for event in events]
    assert any("The 2 lines of the training file make 4 examples" in message for message in messages)
    assert any("Prompts of the model end with '<think>\\n'" in message for message in messages)
    assert "The validation file has 4 with 12 tokens." in messages[-2]


def test_a_pair_is_kept_whole_or_not_at_all() -> None:
    data = Dataset("dpo", 100, 4, truncate=True)
    data.add(b"1", [text([1, 2]), text([1, 3])])
    with pytest.raises(InvalidParameter, match="left of the example where it was cut"):
        data.add(b"2", [text([1, 2]), text([1, 2, 3, 4, 5])])
    assert (data.examples, data.tokens, data.lines) == (1, 4, 1)


def test_a_length_is_told_with_its_bound() -> None:
    with pytest.raises(InvalidParameter, match="5 tokens, more than the model's context of 4 tokens"):
        Dataset("supervised", 4, 9, truncate=False).add(b"", [text([1, 2, 3, 4, 5])])
    with pytest.raises(InvalidParameter, match="more than the job's max_tokens of 3"):
        Dataset("supervised", 9, 3, truncate=False).add(b"", [text([1, 2, 3, 4])])


def test_faults_are_told_with_their_lines() -> None:
    faults = Faults("training_file")
    faults.check_line(3, "not_utf8", 10)
    assert faults.error().message == (
        "The job failed due to an invalid training file. Line 3: This line is not valid UTF-8."
    )
    faults.add(5, InvalidParameter("Unknown.", param="x", reason="unknown_parameter"))
    faults.check_line(7, "too_long", 10)
    assert "which has 3 faults. Line 3" in faults.error().message
    assert "events" not in faults.error().message
    faults.add_of_file("file_too_large", "Too large.")
    assert faults.error().message.endswith("The job's events tell all.")
    assert (faults.error().code, faults.error().param) == ("invalid_training_file", "training_file")
    assert [sentence(fault) for fault in faults.found][1::2] == ["Line 5: Unknown.", "Too large."]
    for line in range(MAX_FAULTS):
        faults.add(line, InvalidParameter("x" * 5000, param=None, reason="y"))
    assert faults.full
    assert "at least" in faults.error().message
    assert len(faults.error().message) < 2000


@pytest.mark.parametrize(
    ("param", "examples", "code"),
    [
        ("training_file", 0, "empty_file"),
        ("training_file", 1, "too_few_examples"),
        ("training_file", 2, ""),
        ("validation_file", 0, "empty_file"),
        ("validation_file", 1, ""),
    ],
)
def test_a_file_has_examples(param: str, examples: int, code: str) -> None:
    faults = Faults(param)
    faults.check_count(examples)
    assert [fault.code for fault in faults.found] == ([code] if code else [])
    faults.check_count(0)
    assert len(faults.found) == 1, "what is told of lines is enough"


@given(
    examples=st.integers(1, 10**6),
    replicas=st.integers(1, 16),
    wanted=st.builds(Hyperparameters, epochs=st.integers(0, 3), batch_size=st.integers(0, 9)),
)
def test_auto_comes_to_a_plan(examples: int, replicas: int, wanted: Hyperparameters) -> None:
    plan = chosen(wanted, "dpo", examples)
    assert 1 <= plan.epochs <= 25
    assert plan.epochs == (wanted.epochs or epochs_for(examples))
    assert plan.batch_size == (wanted.batch_size or batch_size_for(examples))
    assert (plan.learning_rate_multiplier, plan.beta, plan.alpha) == (1.0, 0.1, 32.0)
    assert 1 <= steps_of(plan, examples) <= plan.epochs * examples
    assert min(replicas, examples) <= batch_size_for(examples, replicas) <= max(32, replicas)
    assert chosen(plan, "dpo", examples) == plan


def test_auto_is_what_the_guide_says() -> None:
    assert [epochs_for(count) for count in (2, 10, 33, 34, 1000, 8333, 12_500, 100_000)] == [
        25, 10, 3, 3, 3, 3, 2, 1,
    ]  # fmt: skip
    assert [batch_size_for(count) for count in (2, 700, 1000, 10_000, 100_000)] == [1, 1, 2, 20, 32]
    assert chosen(Hyperparameters(), "supervised", 10).beta == 0.0

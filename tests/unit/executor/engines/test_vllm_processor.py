"""vLLM's processor: its choice against our own sampler's, batches that move, continuations, and what fails.

vLLM itself is not installed: updates of the batch are made up as its interface documents them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.executor.core.sampling_state import SamplingState
from services.executor.engines.vllm.plugin.ryzanstein_vllm.draws import FAN, LEVELS, streams_of, uniforms
from services.executor.engines.vllm.plugin.ryzanstein_vllm.grammars import Grammars, check_grammar
from services.executor.engines.vllm.plugin.ryzanstein_vllm.processor import KeyedSampling
from services.executor.sampling import sampler
from services.executor.sampling.candidates import RowTable
from services.executor.structured_output import GrammarCompiler, Vocabulary
from shared.messages import Grammar, ModelCard, SamplingParams, TokenizerBundle
from shared.nats.bus import encode
from tests.unit.executor.structured_output.guided_ring import ask as request_for
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

VOCABULARY = 24
CARD = ModelCard("m", 100, 258, [1], "t", 0)  # of `tiny_files`, whose token 1 ends texts
GOOD: dict[str, Any] = {"seed": 1, "prompt_tokens": 2}
REGEX = {"kind": "regex", "text": "[a-c]{2,3}"}


class Batch:
    """What vLLM tells a processor of: rows with their prompts, and outputs that grow in place."""

    def __init__(self, ends: list[int] | None = None, load: Callable[[], Any] | None = None) -> None:
        config = SimpleNamespace(try_get_generation_config=lambda: {"eos_token_id": ends or [1]})
        self.processor = KeyedSampling(SimpleNamespace(model_config=config), torch.device("cpu"), False)
        if load is not None:
            self.processor._grammars = Grammars(ends or [1], load)
        self.outputs: dict[int, list[int]] = {}
        self.failures: list[str] = []
        tell = self.processor._tell
        self.processor._tell = lambda row, problem: (self.failures.append(problem), tell(row, problem))  # type: ignore[method-assign]

    def add(self, at: int, extra: object, prompt: Sequence[int] = (5, 6), output: Sequence[int] = ()) -> None:
        self.outputs[at] = list(output)
        given = {} if extra is None else {"ryzanstein": extra}
        self.update(added=[(at, SimpleNamespace(extra_args=given), list(prompt), self.outputs[at])])

    def update(self, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
        size = len(self.outputs)
        self.processor.update_state(SimpleNamespace(batch_size=size, removed=removed, added=added, moved=moved))

    def move(self, source: int, target: int, direction: str, removed: Any = ()) -> None:
        moved, other = self.outputs.pop(source), self.outputs.pop(target)
        self.outputs |= {target: moved} | ({source: other} if direction == "SWAP" else {})
        self.update(removed=removed, moved=[(source, target, SimpleNamespace(name=direction))])

    def step(self, logits: Tensor) -> list[int]:
        """The tokens that vLLM takes, which are put out."""
        self.processor.update_state(None)
        tokens: list[int] = self.processor.apply(logits.clone()).argmax(dim=-1).tolist()
        for at, output in self.outputs.items():
            output.append(tokens[at])
        return tokens

    def run(self, seed: int, steps: int, first: int = 0, width: int = VOCABULARY) -> list[list[int]]:
        """Steps with logits that depend on the position alone, the same in all rows."""
        rows = max(self.outputs) + 1
        taken = [self.step(random_logits(seed + first + step, 1, width).expand(rows, width)) for step in range(steps)]
        return [list(row) for row in zip(*taken, strict=True)]


def random_logits(seed: int, rows: int, width: int = VOCABULARY) -> Tensor:
    """In steps of an eighth: nothing but equal logits gets equal by rounding."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.round(generator.normal(0, 3, (rows, width)) * 8).astype(np.float32) / 8)


def extra(params: SamplingParams, prompt: Sequence[int], stops: Sequence[int] = (), **more: Any) -> dict[str, Any]:
    """Of a request, what is not neutral, as it comes out of JSON."""
    neutral = SamplingParams()
    names = set(SamplingParams.__struct_fields__) - {"seed", "logprobs"}
    given = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(neutral, name)}
    given |= {"seed": params.seed, "prompt_tokens": len(prompt), "stop_token_ids": list(stops)}
    return json.loads(json.dumps(given | more))  # type: ignore[no-any-return]


tokens = st.integers(0, VOCABULARY - 1)
texts = st.lists(tokens, max_size=6)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 30]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    seed=st.integers(0, (1 << 64) - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.75, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.just({}) | st.dictionaries(tokens, st.sampled_from([-5.0, 2.5, 100.0]), max_size=3),
    min_tokens=st.sampled_from([0, 0, 4]),
    allowed_token_ids=st.just([]) | st.lists(st.integers(8, 20), min_size=8, max_size=10, unique=True),
    bad_words=st.just([]) | st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
)
Asked = tuple[SamplingParams, list[int], list[int], list[int]]  # with a prompt, earlier output and output


@given(st.integers(0, 1 << 32), st.lists(st.tuples(parameters, texts, texts, texts), min_size=1, max_size=5))
def test_the_choice_is_the_samplers(seed: int, requests: list[Asked]) -> None:
    """Also where a part of the output was generated by an earlier attempt, which vLLM takes for prompt."""
    logits, stops = random_logits(seed, len(requests)), [2, 3]
    batch, states = Batch(), []
    for at, (params, prompt, earlier, output) in enumerate(requests):
        batch.add(at, extra(params, prompt, stops), [*prompt, *earlier], output)
        states.append(SamplingState(params, prompt, [*earlier, *output], stops))
    assert batch.step(logits) == sampled(logits, states)


def sampled(logits: Tensor, states: list[SamplingState]) -> list[int]:
    """What a ring draws, by the processor's numbers."""
    with patch.object(sampler, "_draw", partial(drawn_by_parts, logits.shape[1])):
        return [one.token for one in sampler.Sampler().sample(logits, states)]


def drawn_by_parts(width: int, table: RowTable, states: list[SamplingState]) -> list[int]:
    """As `draws.draw` of a vocabulary of `width`, told in another way."""
    columns = []
    for at, (row, state) in enumerate(zip(sampler.weights(table, states).double().tolist(), states, strict=True)):
        ids = [table.token(at, column) for column in range(len(row))]
        there = [(token, weight) for token, weight in zip(ids, row, strict=True) if weight]
        numbers = iter(uniforms(streams_of([state.params.seed]), [state.position])[0].tolist())
        parts = [FAN**power for power in reversed(range(LEVELS)) if FAN**power < width or not power]
        for part in parts:
            target = next(numbers) * sum(weight for _, weight in there)
            for _, members in groupby(there, lambda one, part=part: one[0] // part):  # type: ignore[misc]
                there = list(members)
                target -= sum(weight for _, weight in there)
                if target < 0:
                    break
        columns.append(ids.index(there[0][0]))
    return columns


def test_a_wide_vocabulary_with_a_flat_nucleus() -> None:
    """The nucleus is wider than what is looked at first."""
    logits = random_logits(1, 2, 5000) / 100
    params = [SamplingParams(top_p=0.95, seed=seed) for seed in (3, 4)]
    batch = Batch()
    for at, one in enumerate(params):
        batch.add(at, extra(one, []), [])
    assert batch.step(logits) == sampled(logits, [SamplingState(one, [], []) for one in params])


def test_greedy_rows_and_other_clients_are_vllms() -> None:
    batch, logits = Batch(), random_logits(1, 4)
    batch.add(0, None)
    batch.add(1, GOOD | {"grammar": {"kind": "regex", "text": "["}})  # its place is taken before it is computed
    batch.add(1, GOOD | {"temperature": 0.0})
    batch.add(2, GOOD | {"top_k": 1})
    assert not batch.processor._rows
    batch.add(3, GOOD)
    after = batch.processor.apply(logits.clone())
    assert torch.equal(after[:3], logits[:3])
    assert sorted(after[3].tolist()) == [-torch.inf] * (VOCABULARY - 1) + [0.0]
    assert not batch.processor.is_argmax_invariant()
    assert not batch.failures


@pytest.mark.parametrize("done", [1, 7, 15])
def test_a_continuation_goes_on_undisturbed(done: int) -> None:
    """Penalties, bad words, bans and grammars count from the answer's first token on."""
    prompt = [3, 4, 5]
    asks = [
        extra(SamplingParams(seed=7, repetition_penalty=1.5, frequency_penalty=0.5), prompt),
        extra(SamplingParams(seed=8, bad_words=[[1, 2], [9], [2, 3, 4]], presence_penalty=2.0), prompt),
        extra(SamplingParams(seed=9, min_tokens=9), prompt, [1, 2, 3, 4, 6]),
        extra(SamplingParams(seed=10, temperature=0.0, repetition_penalty=3.0), prompt),
    ]
    whole, rest = Batch(), Batch()
    for at, one in enumerate(asks):
        whole.add(at, one, prompt)
    answers = whole.run(100, 16)
    for at, one in enumerate(asks):
        rest.add(at, one, [*prompt, *answers[at][:done]])
    assert rest.run(100, 16 - done, first=done) == [answer[done:] for answer in answers]
    assert not {1, 2, 3, 4, 6} & set(answers[2][:9])


@pytest.mark.parametrize(
    ("move", "order"),
    [((0, 2, "SWAP"), [2, 1, 0, 3]), ((3, 1, "UNIDIRECTIONAL", [1]), [0, 3, 2])],  # of the latter, row 1 has ended
)
def test_rows_that_move_in_the_batch(move: Any, order: list[int]) -> None:
    still, moving = Batch(), Batch()
    for at in range(4):
        still.add(at, GOOD | {"seed": at, "frequency_penalty": 1.0})
        moving.add(at, GOOD | {"seed": at, "frequency_penalty": 1.0})
    before, expected = moving.run(5, 4), still.run(5, 9)
    moving.move(*move)
    assert sorted(moving.processor._rows) == list(range(len(order)))
    assert moving.run(5, 5, first=4) == [expected[row][4:] for row in order]
    assert before == [row[:4] for row in expected]


def test_output_that_vllm_takes_back_is_forgotten() -> None:
    ask = GOOD | {"frequency_penalty": 5.0}
    batch, again = Batch(), Batch()
    batch.add(0, ask)
    answer = batch.run(3, 6)[0]
    del batch.outputs[0][3:]
    again.add(0, ask, output=answer[:3])
    assert batch.run(3, 3, first=3)[0] == again.run(3, 3, first=3)[0] == answer[3:]


def test_a_token_that_is_not_told_yet() -> None:
    """vLLM's placeholder counts as a position; what depends on the token itself fails."""
    batch, logits = Batch(), random_logits(2, 2)
    batch.add(0, GOOD, output=[7, -1])
    batch.add(1, GOOD | {"frequency_penalty": 1.0}, output=[7, -1])
    told = Batch()
    told.add(0, GOOD, output=[7, 9])
    assert batch.step(logits) == [told.step(logits[:1])[0], 1]
    assert "--no-async-scheduling" in batch.failures[0]


def test_padding_is_never_chosen() -> None:
    batch, logits = Batch(), random_logits(1, 4)
    batch.add(0, GOOD | {"temperature": 0, "vocab_size": 20})
    batch.add(1, GOOD | {"vocab_size": 20, "bad_words": [[3]]})
    batch.add(2, GOOD | {"vocab_size": 20, "min_p": 0.5})
    batch.add(3, None)
    logits[:, 20:] = 50.0
    assert [token < 20 for token in batch.step(logits)] == [True, True, True, False]


# --- grammars ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(Vocabulary.of(CARD, encode(TokenizerBundle(tiny_files()))))
    yield made
    made.close()


@pytest.mark.parametrize("stops", [[1], [], [1, 5]])
@pytest.mark.parametrize("width", [258, 270])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_masks_are_the_rings(compiler: GrammarCompiler, kind: Any, width: int, stops: list[int]) -> None:
    text = {"json_schema": '{"enum": ["ab", 17]}', "regex": "[a-c]{2,3}x?", "lark": 'start: "a" start | "b"'}[kind]
    grammar = {"kind": kind, "text": text}
    batch = Batch(load=lambda: compiler._vocabulary.tokenizer)
    batch.add(0, {"seed": 3, "prompt_tokens": 1, "grammar": grammar, "stop_token_ids": stops, "vocab_size": 258}, [4])
    state = compiler.start(request_for(Grammar(kind, text), stop_token_ids=stops))
    for step in range(12):
        batch.processor.apply(random_logits(step, 1, width))
        row = batch.processor._rows[0]
        mask = row.mask(width)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if state.complete:
            assert allowed == [1]
            break
        assert allowed == np.flatnonzero(state.allowed()).tolist()
        state.advance(batch.step(random_logits(step, 1, width))[0])
    assert state.complete
    assert not batch.failures


def test_a_grammar_is_continued_in_its_middle(compiler: GrammarCompiler) -> None:
    schema = {"kind": "json_schema", "text": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}
    ask = {"seed": 5, "prompt_tokens": 1, "grammar": schema, "stop_token_ids": [1], "top_k": 40}
    whole, rest = (Batch(load=lambda: compiler._vocabulary.tokenizer) for _ in range(2))
    whole.add(0, ask, [4])
    answer = whole.run(1, 30, width=258)[0]
    rest.add(0, ask, [4, *answer[:11]])
    assert rest.run(1, 19, first=11, width=258)[0] == answer[11:]


BAD = [
    ({"kind": "regex", "text": "["}, "cannot be enforced"),
    ({"kind": "json_schema", "text": "[]"}, "not a JSON object"),
    ({"kind": "json_schema", "text": '{"const": 9007199254740993}'}, "9007199254740993"),
    ({"kind": "lark", "text": "start: nothing"}, "cannot be enforced"),
    ({"kind": "lark", "text": " "}, "empty"),
]


@pytest.mark.parametrize(("grammar", "reason"), BAD)
def test_a_bad_grammar_ends_its_row_alone(compiler: GrammarCompiler, grammar: Mapping[str, str], reason: str) -> None:
    batch, alone = (Batch(load=lambda: compiler._vocabulary.tokenizer) for _ in range(2))
    batch.add(0, {"seed": 5, "prompt_tokens": 2, "grammar": grammar, "stop_token_ids": [9, 1]})
    for each, at in ((batch, 1), (alone, 0)):
        each.add(at, {"seed": 6, "prompt_tokens": 2, "grammar": REGEX, "stop_token_ids": [1]})
    taken = batch.run(1, 3, width=258)
    assert taken == [[9, 9, 9], alone.run(1, 3, width=258)[0]]
    assert reason in batch.failures[0]
    assert len(batch.failures) == 1
    assert check_grammar(grammar)
    assert not check_grammar(REGEX)


NOTHING_IS_BOTH = {"grammar": {"kind": "regex", "text": "x+"}, "allowed_token_ids": [70]}


@pytest.mark.parametrize("more", [NOTHING_IS_BOTH, {"prompt_tokens": 40}, {"temperature": "hot"}], ids=str)
def test_what_else_ends_a_row(compiler: GrammarCompiler, more: dict[str, Any]) -> None:
    batch = Batch(load=lambda: compiler._vocabulary.tokenizer)
    batch.add(0, GOOD | more)
    assert batch.step(random_logits(1, 1, 258)) == [1]
    assert len(batch.failures) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_end_their_row_alone(bad: float) -> None:
    batch, alone, logits = Batch(ends=[7]), Batch(), random_logits(3, 2)
    for each, at in ((batch, 0), (batch, 1), (alone, 0)):
        each.add(at, GOOD)
    logits[0, 4] = bad
    assert batch.step(logits) == [7, alone.step(logits[1:])[0]]


def test_a_bug_ends_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch()
    batch.add(0, GOOD)
    monkeypatch.setattr(batch.processor, "_penalise", lambda *_: 1 // 0)
    assert batch.step(random_logits(3, 1)) == [1]


# --- what is refused -----------------------------------------------------------------------------

MALFORMED: list[Any] = [
    7, {}, {"seed": 1}, GOOD | {"sead": 1}, GOOD | {"seed": -1}, GOOD | {"seed": 1 << 64}, GOOD | {"seed": 1.0},
    GOOD | {"seed": True}, GOOD | {"prompt_tokens": "2"}, GOOD | {"temperature": -1}, GOOD | {"temperature": None},
    GOOD | {"temperature": float("nan")}, GOOD | {"top_k": -1}, GOOD | {"top_k": 1.5}, GOOD | {"top_p": 1.1},
    GOOD | {"min_p": -0.1}, GOOD | {"repetition_penalty": 0}, GOOD | {"presence_penalty": 1e7},
    GOOD | {"frequency_penalty": "1"}, GOOD | {"min_tokens": -1}, GOOD | {"vocab_size": -1},
    GOOD | {"logit_bias": [1]}, GOOD | {"logit_bias": {"x": 1}}, GOOD | {"logit_bias": {-1: 1}},
    GOOD | {"logit_bias": {1: "a"}}, GOOD | {"logit_bias": {1: float("inf")}}, GOOD | {"stop_token_ids": 1},
    GOOD | {"stop_token_ids": [1 << 31]}, GOOD | {"allowed_token_ids": [-1]}, GOOD | {"allowed_token_ids": ["1"]},
    GOOD | {"bad_words": [1]}, GOOD | {"bad_words": [[]]}, GOOD | {"bad_words": [["a"]]}, GOOD | {"grammar": "x"},
    GOOD | {"grammar": {"kind": "gbnf", "text": "x"}}, GOOD | {"grammar": {"kind": "regex"}},
    GOOD | {"grammar": {"kind": "regex", "text": "x" * (1 << 20)}}, GOOD | {"vocab_size": 9, "logit_bias": {"9": 1.0}},
]  # fmt: skip


@pytest.mark.parametrize("given", MALFORMED, ids=str)
def test_what_is_malformed_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$"):
        KeyedSampling.validate_params(SimpleNamespace(extra_args={"ryzanstein": given}))


@pytest.mark.parametrize("other", [{"temperature": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 1.0}}])
def test_parameters_beside_it_are_refused(other: dict[str, Any]) -> None:
    KeyedSampling.validate_params(SimpleNamespace(extra_args=None, **other))
    KeyedSampling.validate_params(SimpleNamespace(extra_args={"ryzanstein": GOOD}, temperature=0.0))
    with pytest.raises(ValueError, match="beside"):
        KeyedSampling.validate_params(SimpleNamespace(extra_args={"ryzanstein": GOOD}, **other))

"""With a draft model a ring says what it says without; a draft model that is the model itself is always right."""

import itertools
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from services.executor.core.engine import BadLogits
from services.executor.core.settings import MTP, ExecutorSettings
from services.executor.sampling.sampler import Sampler
from services.executor.worker.drafting import loading, vocabulary
from services.executor.worker.drafting.catalog import DRAFT_KINDS
from services.executor.worker.drafting.heads import Heads
from services.executor.worker.drafting.whole_models import WholeModels
from shared.errors import ConfigurationError, InternalError, ModelLoadError
from shared.messages import SamplingParams
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.drafting_ring import CONTEXT, Generated, Ring, ring_of

PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 21, 40, 3]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "top-k": SamplingParams(temperature=0.9, top_k=20, seed=8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=9),
}
NATIVE = {"head_dim": 32, "hidden_size": 144}
NAMES = [f"t{token}" for token in range(131)]
DELTA_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def model_in(
    directory: Path, vocabulary: list[str] | None = None, model_type: str = "llama", **changes: object
) -> Path:
    """With a tokenizer of as many tokens as its vocabulary."""
    make_model(directory, model_type, **{**NATIVE, **changes})
    (directory / "tokenizer.json").write_text(tokenizer_of(vocabulary or NAMES))
    return directory


def tokenizer_of(tokens: list[str], added: Sequence[str] = ()) -> str:
    more = [{"id": len(tokens) + at, "content": token, "special": True} for at, token in enumerate(added)]
    vocab = {token: number for number, token in enumerate(tokens)}
    none = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps({**none, "version": "1.0", "added_tokens": more, "model": model})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(model, tmp_path_factory.mktemp("twin") / "model"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fewer layers, other heads of another width, with windows."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return model_in(tmp_path_factory.mktemp("small"), **sizes, hidden_size=64, tie_word_embeddings=False)


def texts(ring: Ring, drafts: int, length: int = 20, *, followed: bool = True) -> dict[str, Generated]:
    blocks = CONTEXT // 8
    return {
        name: Generated(ring, PROMPT, sampling, at * blocks).run(length, drafts, followed=followed)
        for at, (name, sampling) in enumerate(SAMPLINGS.items())
    }


def told(found: dict[str, Generated]) -> dict[str, list[int]]:
    return {name: sequence.text for name, sequence in found.items()}


# Without the library ranks meet in torch's process group, which is one to a process.
RANKS = [1, pytest.param(2, marks=natively)]
COMPUTED = [pytest.param("bf16", marks=natively, id="native"), pytest.param("fp32", id="pytorch")]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=[natively, pytest.mark.nightly])])
@pytest.mark.parametrize("dtype", COMPUTED)
def test_the_model_itself_is_always_right(tmp_path: Path, model: Path, twin: Path, dtype: str, tp: int) -> None:
    """Whether it computes what the model computes, or in its rounds all that it has missed."""
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        assert not ring.spec.drafts
        plain = told(texts(ring, 0))
        with pytest.raises(InternalError, match="no draft model"):
            Generated(ring, PROMPT, SAMPLINGS["greedy"]).run(3, 1)
    with ring_of(tmp_path, model, twin, tp=tp, dtype=dtype) as ring:
        assert ring.spec.drafts
        assert ("native" in ring.spec.kernels) == (dtype == "bf16")
        drafted = texts(ring, 4)
        drafted |= {f"{name}, behind": one for name, one in texts(ring, 4, followed=False).items()}
    for name, sequence in drafted.items():
        assert sequence.text == plain[name.removesuffix(", behind")]
        assert sequence.accepted == sequence.proposed > 10, name
        assert all(0 < token.probability <= 1 for token in sequence.proposals)


@pytest.mark.parametrize(
    ("dtype", "tp"),
    [
        pytest.param("bf16", 1, marks=natively, id="native-1"),
        pytest.param("fp32", 1, id="pytorch-1"),
        pytest.param("bf16", 2, marks=[natively, pytest.mark.slow], id="native-2"),
        pytest.param("fp32", 2, marks=[natively, pytest.mark.nightly], id="pytorch-2"),
    ],
)
def test_whatever_it_proposes_the_text_is_the_same(
    tmp_path: Path, model: Path, small: Path, dtype: str, tp: int
) -> None:
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        plain, numerics = told(texts(ring, 0)), ring.spec.numerics
    with ring_of(tmp_path, model, small, tp=tp, dtype=dtype) as ring:
        assert ring.spec.numerics == numerics
        drafted = texts(ring, 3)
    assert told(drafted) == plain
    assert all(token.token < 131 for sequence in drafted.values() for token in sequence.proposals)


@pytest.mark.slow
def test_tokens_and_positions_that_one_of_the_models_does_not_have(tmp_path: Path, model: Path) -> None:
    """The draft model's vocabulary is padded, and its context ends in the middle of the text."""
    padded = model_in(tmp_path / "padded", vocab_size=400, max_position_embeddings=24)
    fewer = model_in(tmp_path / "fewer", vocabulary=NAMES[:20], vocab_size=20)
    (fewer / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with ring_of(tmp_path, model, dtype="fp32") as ring:
        plain = told(texts(ring, 0))
    with ring_of(tmp_path, model, padded, dtype="fp32") as ring:
        drafted = texts(ring, 3)
        assert told(drafted) == plain
        sequence = Generated(ring, PROMPT, SAMPLINGS["greedy"]).run(20, 3)
        assert all(token == (0, 0.0) for token in sequence.proposals[-6:])
    proposals = [token for one in drafted.values() for token in one.proposals]
    assert all(token.token < 131 for token in proposals)
    assert {token.probability > 0 for token in proposals} == {True, False}
    with ring_of(tmp_path, model, fewer, dtype="fp32") as ring:
        assert told(texts(ring, 3)) == plain


def test_a_draft_model_that_computes_no_numbers_proposes_nothing(
    tmp_path: Path, model: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(self: Sampler, logits: object, states: list[object]) -> None:
        raise BadLogits([0])

    with ring_of(tmp_path, model, small, dtype="fp32") as ring:
        plain = Generated(ring, PROMPT, SAMPLINGS["seeded"]).run(12)
        proposer = ring.engine._draft_sampler
        monkeypatch.setattr(proposer._sampler, "sample", bad.__get__(proposer._sampler))
        with structlog.testing.capture_logs() as logged:
            sequence = Generated(ring, PROMPT, SAMPLINGS["seeded"], 12).run(12, 3)
    assert sequence.text == plain.text
    assert set(sequence.proposals) == {(0, 0.0)}
    assert {line["event"] for line in logged} == {"draft_model_not_finite"}


# --- what is refused, and what is served without -------------------------------------------------


def test_where_both_do_not_fit_the_model_is_served_alone(tmp_path: Path, model: Path, twin: Path) -> None:
    """One sequence of the model fits, and one of both does not."""
    line = 3 * 2 * 3 * 32 * 4  # layers, keys and values, heads, their width
    room = CONTEXT * line * 5 // 4
    with (
        structlog.testing.capture_logs() as logged,
        ring_of(tmp_path, model, twin, dtype="fp32", kv_memory=room) as ring,
    ):
        assert not ring.spec.drafts
        assert ring.spec.draft_model == "model"
        assert "fewer than one sequence of 96 takes" in ring.spec.draft_left_out
        card, _ = ring.engine.card("m")
        assert (card.draft_model, card.draft_left_out) == ("model", ring.spec.draft_left_out)
        assert len(Generated(ring, PROMPT, SAMPLINGS["greedy"]).run(8).text) == 8
    [told_in_log] = [line for line in logged if line["event"] == "draft_model_left_out"]
    assert told_in_log["log_level"] == "warning"


@natively
def test_what_one_rank_of_two_has_no_room_for_all_do_without(
    tmp_path: Path, model: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = itertools.count()

    def checked(*arguments: object) -> None:
        if next(ranks) == 1:
            raise ConfigurationError("There is no room.")

    monkeypatch.setattr(loading, "check_room", checked)
    with ring_of(tmp_path, model, twin, tp=2, dtype="fp32") as ring:
        assert not ring.spec.drafts
        assert ring.spec.draft_left_out in ("There is no room.", "Another rank has no room for it.")
        assert len(Generated(ring, PROMPT, SAMPLINGS["greedy"]).run(8).text) == 8


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("recurrent", "The draft model has layers that keep a state .*, or leave out --draft-model"),
        ("classifier", r"The draft model in .* does not generate token by token; leave out --draft-model"),
        ("gone", "The model .*nowhere does not exist; check the path"),
    ],
)
def test_models_that_do_not_go_together(tmp_path: Path, model: Path, kind: str, message: str) -> None:
    other = tmp_path / "nowhere"
    if kind == "recurrent":
        model_in(other, model_type="qwen3_5_text", **DELTA_SIZES)
    elif kind == "classifier":
        shutil.copytree(model, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ModelLoadError, match=message), ring_of(tmp_path, model, other, dtype="fp32"):
        pass


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (NAMES, ""),
        ([*NAMES, "<extra>"], ""),
        (
            ["a", *NAMES[1:7], "b", "c", "d", *NAMES[10:]],
            "token 0 is 'a' and not 't0', token 7 is 'b' and not 't7', token 8 is 'c' and not 't8', 1 more differ",
        ),
        ([*NAMES, *(f"u{token}" for token in range(200))], "it has 331 tokens and not 131"),
        (["x" * 99, *NAMES[1:]], f"token 0 is '{'x' * 24}…' and not 't0'"),
    ],
)
def test_vocabularies_are_compared(tmp_path: Path, tokens: list[str], problem: str) -> None:
    for name, own in (("target", NAMES), ("draft", tokens)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(tokenizer_of(own))
    assert vocabulary.vocabulary_problem(tmp_path / "target", tmp_path / "draft") == problem


def test_special_tokens_and_vocabularies_with_scores_are_compared_too(tmp_path: Path) -> None:
    scored = {"type": "Unigram", "vocab": [[token, -1.0] for token in NAMES]}
    files = {"plain": tokenizer_of(NAMES, ["<s>"]), "other": tokenizer_of(NAMES, ["<b>"])}
    files["scored"] = json.dumps({"model": scored, "added_tokens": [{"id": 131, "content": "<s>"}]})
    for name, content in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    assert vocabulary.vocabulary_problem(tmp_path / "plain", tmp_path / "scored") == ""
    problem = vocabulary.vocabulary_problem(tmp_path / "plain", tmp_path / "other")
    assert problem == "token 131 is '<b>' and not '<s>'"


@pytest.mark.parametrize("content", [None, "{", '{"model": {"vocab": 5}}', '{"model": {"vocab": ["a"]}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, model: Path, twin: Path, content: str | None) -> None:
    draft = Path(shutil.copytree(twin, tmp_path / "draft"))
    (draft / "tokenizer.json").unlink()
    if content is not None:
        (draft / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer.json"), ring_of(tmp_path, model, draft):
        pass


def test_another_vocabulary_is_refused_before_anything_is_read(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((model / "config.json").read_text())
    (other / "tokenizer.json").write_text(tokenizer_of(NAMES[::-1]))
    with (
        pytest.raises(ModelLoadError, match=r"another vocabulary: token 0 is 't130' and not 't0', .* more differ"),
        ring_of(tmp_path, model, other),
    ):
        pass


def test_without_speculation_none_is_read(tmp_path: Path, model: Path) -> None:
    with ring_of(tmp_path, model, tmp_path / "nowhere", dtype="fp32", speculation="off") as ring:
        assert (ring.spec.drafts, ring.spec.draft_model, ring.spec.draft_left_out) == (False, "", "")


@natively
def test_both_are_read_from_the_weight_cache(tmp_path: Path, model: Path, small: Path) -> None:
    cache = {"weight_cache_bytes": 1 << 30, "weight_cache_directory": str(tmp_path / "kept"), "dtype": "bf16"}
    found = []
    for _ in range(2):
        with structlog.testing.capture_logs() as logged, ring_of(tmp_path, model, small, **cache) as ring:
            ring.engine.card("m")  # after which weights are kept
            for thread in threading.enumerate():
                if thread.name == "keep weights":
                    thread.join(60)
            found.append((told(texts(ring, 3, 12)), ring.spec.imports))
    assert [line["weights"] for line in logged if "native" in line["event"]] == ["cached", "cached"]
    assert found[0] == found[1]


# --- kinds ----------------------------------------------------------------------------------------


KINDS = {"model": ("LlamaForCausalLM", WholeModels), "head": ("LlamaForCausalLMEagle3", Heads)}


def no_model(name: str, *_: object) -> Path:
    raise ModelLoadError(f"{name} is no model")


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("left_out", [None, *DRAFT_KINDS], ids=lambda kind: type(kind).__name__)
def test_without_one_kind_the_other_serves(
    what: str, left_out: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, own = KINDS[what]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    kinds = tuple(kind for kind in DRAFT_KINDS if kind is not left_out)
    monkeypatch.setattr(loading, "DRAFT_KINDS", kinds)
    settings = ExecutorSettings(draft_model=str(tmp_path))
    if what == "model" and isinstance(left_out, WholeModels):
        with pytest.raises(ModelLoadError, match=r"The directory .*leave it out"):
            loading.kind_of(settings, tmp_path)
        return
    expected = own if any(isinstance(kind, own) for kind in kinds) else WholeModels
    assert isinstance(loading.kind_of(settings, tmp_path), expected)


def test_the_model_itself_has_heads_while_they_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ExecutorSettings(draft_model=MTP)
    assert loading.draft_directory(settings, tmp_path) == tmp_path
    monkeypatch.setattr(loading, "DRAFT_KINDS", (WholeModels(),))
    monkeypatch.setattr(loading, "resolve_model", no_model)
    with pytest.raises(ModelLoadError, match="mtp is no model"):
        loading.draft_directory(settings, tmp_path)

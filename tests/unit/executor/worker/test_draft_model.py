"""With a draft model a ring says what it says without; a draft model that is the model itself is always right."""

import json
import shutil
from pathlib import Path

import pytest

from services.executor.native import library
from shared.errors import InternalError
from shared.messages import SamplingParams
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.drafting_ring import CONTEXT, Generated, Ring, ring_of

natively = pytest.mark.skipif(bool(library.why_not()), reason=f"native kernels: {library.why_not()}")
PROMPT = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 21, 40, 3]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=7),
    "top-k": SamplingParams(temperature=0.9, top_k=20, seed=8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=9),
}
NATIVE = {"head_dim": 32, "hidden_size": 144}


def model_in(
    directory: Path, vocabulary: list[str] | None = None, model_type: str = "llama", **changes: object
) -> Path:
    """With a tokenizer of as many tokens as its vocabulary."""
    make_model(directory, model_type, **{**NATIVE, **changes})
    tokens = vocabulary or [f"t{token}" for token in range(131)]
    (directory / "tokenizer.json").write_text(tokenizer_of(tokens))
    return directory


def tokenizer_of(tokens: list[str], added: list[str] = []) -> str:  # noqa: B006
    more = [{"id": len(tokens) + at, "content": token, "special": True} for at, token in enumerate(added)]
    vocab = {token: number for number, token in enumerate(tokens)}
    return json.dumps(
        {"version": "1.0", "added_tokens": more, "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    )


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


def texts(ring: Ring, drafts: int, length: int = 40) -> dict[str, Generated]:
    blocks = CONTEXT // 8
    return {
        name: Generated(ring, PROMPT, sampling, at * blocks).run(length, drafts)
        for at, (name, sampling) in enumerate(SAMPLINGS.items())
    }


COMPUTED = [pytest.param("bf16", marks=natively, id="native"), pytest.param("fp32", id="pytorch")]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", COMPUTED)
def test_the_model_itself_is_always_right(
    tmp_path: Path, model: Path, twin: Path, dtype: str, tp: int
) -> None:
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        assert not ring.spec.drafts
        plain = texts(ring, 0)
        with pytest.raises(InternalError, match="no draft model"):
            Generated(ring, PROMPT, SAMPLINGS["greedy"]).run(3, 1)
    with ring_of(tmp_path, model, twin, tp=tp, dtype=dtype) as ring:
        assert ring.spec.drafts
        assert ("native" in ring.spec.kernels) == (dtype == "bf16")
        drafted = texts(ring, 4)
    for name, sequence in drafted.items():
        assert sequence.text == plain[name].text
        assert sequence.accepted == sequence.proposed > 25, name
        assert all(0 < token.probability <= 1 for token in sequence.proposals)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", COMPUTED)
def test_whatever_it_proposes_the_text_is_the_same(
    tmp_path: Path, model: Path, small: Path, dtype: str, tp: int
) -> None:
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        plain, numerics = texts(ring, 0), ring.spec.numerics
    with ring_of(tmp_path, model, small, tp=tp, dtype=dtype) as ring:
        assert ring.spec.numerics == numerics
        drafted = texts(ring, 3)
    assert {name: one.text for name, one in drafted.items()} == {
        name: one.text for name, one in plain.items()
    }

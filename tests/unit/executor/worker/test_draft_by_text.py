"""Draft models with another tokenizer: one that is the model under other numbers is right as often as one with the same
tokenizer, and whatever one proposes the text is the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import structlog

from shared.errors import ModelLoadError
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.drafting_pairs import in_bytes, in_pieces, renumbered, tokenizer_in
from tests.unit.executor.worker.drafting_ring import ring_of
from tests.unit.executor.worker.test_draft_model import NATIVE, tokenizer_of, told
from tests.unit.executor.worker.test_draft_model import texts as generated

SIZE = 131
TEXTS = [f" w{token}" for token in range(SIZE - 2)]
# The texts of the other tokenizer. Special tokens come last in both.
ORDER = np.random.default_rng(5).permutation(SIZE - 2).tolist()
COMPUTED = [
    pytest.param("bf16", 2, marks=[natively, pytest.mark.slow], id="native"),
    pytest.param("fp32", 1, id="pytorch"),
]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_model(tmp_path_factory.mktemp("model"), "llama", **NATIVE)
    return tokenizer_in(directory, in_pieces(TEXTS))


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = renumbered(model, tmp_path_factory.mktemp("twin") / "model", [*ORDER, SIZE - 2, SIZE - 1])
    return tokenizer_in(directory, in_bytes([TEXTS[token] for token in ORDER]))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model's texts it has three in four, and more of its own, and another number of tokens."""
    directory = make_model(tmp_path_factory.mktemp("other"), "llama", **SMALL, hidden_size=64, vocab_size=150)
    own = [TEXTS[token] if token % 4 else f"x{token}" for token in ORDER]
    return tokenizer_in(directory, in_bytes([*own, *(f"y{more}" for more in range(10))]))


@pytest.mark.parametrize(("dtype", "tp"), COMPUTED)
def test_the_model_under_other_numbers_is_right(tmp_path: Path, model: Path, twin: Path, dtype: str, tp: int) -> None:
    """Where it draws, too: the same random number leads to the same text."""
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        plain, numerics = told(generated(ring, 0)), ring.spec.numerics
    with structlog.testing.capture_logs() as logged, ring_of(tmp_path, model, twin, tp=tp, dtype=dtype) as ring:
        assert (ring.spec.drafts, ring.spec.numerics) == (True, numerics)
        drafted = generated(ring, 4)
    for name, sequence in drafted.items():
        assert sequence.text == plain[name]
        # Kernels may add up the same row in another order where it lies elsewhere.
        assert sequence.accepted > 0.8 * sequence.proposed > 8, name
        assert all(0 < token.probability <= 1 for token in sequence.proposals)
    [by_text] = [line for line in logged if line["event"] == "draft_model_by_text"]
    assert (by_text["draft_model"], by_text["shared"]) == (str(twin), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tp"), COMPUTED)
def test_whatever_it_proposes_the_text_is_the_same(
    tmp_path: Path, model: Path, other: Path, dtype: str, tp: int
) -> None:
    with ring_of(tmp_path, model, tp=tp, dtype=dtype) as ring:
        plain = told(generated(ring, 0))
    with ring_of(tmp_path, model, other, tp=tp, dtype=dtype) as ring:
        drafted = generated(ring, 3)
    assert told(drafted) == plain
    proposals = [one for sequence in drafted.values() for one in sequence.proposals]
    assert all(0 < one.probability <= 1 for one in proposals)
    missing = {token for token in range(SIZE - 2) if token % 4 == 0}
    assert {one.token for one in proposals} <= set(range(SIZE)) - missing


# --- what is refused -----------------------------------------------------------------------------


def test_too_few_texts_in_common(tmp_path: Path, model: Path) -> None:
    others = [f" v{token}" if token % 5 else TEXTS[token] for token in range(100)]
    draft = tokenizer_in(shutil.copytree(model, tmp_path / "draft"), in_bytes(others))
    message = r"another vocabulary: .*, and of the smaller one's texts 20% are tokens of both, .* need 50%; choose"
    with pytest.raises(ModelLoadError, match=message), ring_of(tmp_path, model, draft):
        pass


def test_texts_that_cannot_be_told(tmp_path: Path, model: Path) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    (draft / "tokenizer.json").write_text(tokenizer_of(TEXTS[::-1]))
    message = r"another vocabulary: token 0 is .* put out cannot be told from its tokenizer.json \(.*decoder"
    with pytest.raises(ModelLoadError, match=message), ring_of(tmp_path, model, draft):
        pass
    assert json.loads((draft / "tokenizer.json").read_text())["decoder"] is None

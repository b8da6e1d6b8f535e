"""A model with recurrent layers says what it says without drafts, whoever proposes them."""

from pathlib import Path

import pytest

from tests.unit.executor.worker.draft_heads import QWEN, add_mtp_head
from tests.unit.executor.worker.drafting_ring import ring_of
from tests.unit.executor.worker.test_batched_drafts import Texts, generate, natively
from tests.unit.executor.worker.test_draft_model import DELTA_SIZES, model_in

NATIVE_SIZES = {
    **DELTA_SIZES,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def said_without(tmp_path: Path, model: Path, **shape: object) -> tuple[list[Texts], str]:
    (tmp_path / "plain").mkdir()
    with ring_of(tmp_path / "plain", model, **shape) as ring:
        assert ring.spec.num_states
        return generate(ring.engine, ring.spec, 0).turns, ring.spec.numerics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tp"),
    [
        ("fp32", 1),
        pytest.param("bf16", 1, marks=[natively, pytest.mark.slow]),
        pytest.param("bf16", 2, marks=[natively, pytest.mark.nightly]),
        pytest.param("fp32", 2, marks=[natively, pytest.mark.nightly]),
    ],
)
def test_a_draft_model_that_is_often_wrong_changes_no_text(tmp_path: Path, dtype: str, tp: int) -> None:
    model = model_in(tmp_path / "model", None, "qwen3_5_text", **NATIVE_SIZES)
    small = model_in(tmp_path / "small", num_hidden_layers=1, **DELTA_SIZES)
    shape = {"dtype": dtype, "tp": tp, "kv_dtype": "int8" if dtype == "bf16" else "bf16"}
    plain, numerics = said_without(tmp_path, model, **shape)
    with ring_of(tmp_path, model, small, **shape) as ring:
        assert ring.spec.drafts
        assert ring.spec.draft_states
        assert ring.spec.numerics == numerics
        assert ("native" in ring.spec.kernels) == (dtype == "bf16")
        drafted, devoted, *_ = generate(ring.engine, ring.spec, 3, knows=False)
    assert drafted == plain
    assert devoted.wrong > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [pytest.param("bf16", marks=natively), pytest.param("fp32", marks=pytest.mark.nightly)]
)
def test_the_models_own_head_changes_no_text(tmp_path: Path, dtype: str) -> None:
    model = model_in(tmp_path / "model", None, "qwen3_5_text", **NATIVE_SIZES)
    add_mtp_head(model, names=QWEN, shared=True)
    shape = {"dtype": dtype, "kv_dtype": "int8" if dtype == "bf16" else "bf16"}
    plain, _ = said_without(tmp_path, model, **shape)
    with ring_of(tmp_path, model, "mtp", **shape) as ring:
        assert ring.spec.draft_reads_states
        drafted, devoted, *_ = generate(ring.engine, ring.spec, 3, knows=False)
    assert drafted == plain
    assert devoted.wrong > 50

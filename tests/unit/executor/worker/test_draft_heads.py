"""Heads for multi-token prediction and EAGLE-3 checkpoints propose what their mathematics gives, and change no text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.executor.native import library
from shared.errors import ModelLoadError
from shared.messages import SamplingParams
from tests.unit.executor.worker.draft_heads import Eagle3Reference, MtpReference, add_mtp_head, make_eagle3
from tests.unit.executor.worker.drafting_ring import Generated, ring_of
from tests.unit.executor.worker.test_draft_model import PROMPT, RANKS, model_in, natively, told, texts

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = model_in(tmp_path_factory.mktemp("glm"), None, "glm4_moe", head_dim=16, hidden_size=96)
    add_mtp_head(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("llama"), num_hidden_layers=6)


def check(proposed: Generated, reference: Any) -> None:
    """Each of three proposals is the most likely token, with its probability, behind those before it."""
    for at in range(0, len(proposed.proposals), 3):
        tokens, found = proposed.behind[at // 3], proposed.proposals[at : at + 3]
        for number, token in enumerate(found):
            logits = reference.proposal(tokens, [one.token for one in found[:number]])
            assert token.token == int(logits.argmax())
            assert token.probability == pytest.approx(float(logits.softmax(-1).max()), rel=1e-3)


@pytest.mark.parametrize("tp", RANKS)
def test_a_models_own_head_computes_what_its_checkpoint_means(tmp_path: Path, glm: Path, tp: int) -> None:
    with ring_of(tmp_path, glm, "mtp", tp=tp, dtype="fp32") as ring:
        assert ring.spec.drafts and ring.spec.draft_reads_states
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
        behind = Generated(ring, PROMPT, GREEDY, 12, rewrites=True).run(16, 3, followed=False)
    check(found, MtpReference(glm))
    assert behind.text == found.text


@pytest.mark.parametrize("before", [False, True], ids=["residual of states", "residual of normed states"])
@pytest.mark.parametrize("tp", RANKS)
def test_an_eagle3_head_computes_what_its_checkpoint_means(
    tmp_path: Path, llama: Path, tp: int, before: bool
) -> None:
    head = make_eagle3(tmp_path / "head", 144, norm_before_residual=before)
    with ring_of(tmp_path, llama, head, tp=tp, dtype="fp32") as ring:
        assert ring.spec.drafts
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
    check(found, Eagle3Reference(head, llama, (2, 3, 3)))


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=natively), "fp32"])
def test_no_head_changes_a_text(tmp_path: Path, glm: Path, dtype: str, tp: int) -> None:
    with ring_of(tmp_path, glm, tp=tp, dtype=dtype) as ring:
        plain = told(texts(ring, 0))
    with ring_of(tmp_path, glm, "mtp", tp=tp, dtype=dtype) as ring:
        assert ring.spec.drafts
        assert ("native" in ring.spec.kernels) == (dtype == "bf16")
        assert told(texts(ring, 3)) == plain


def test_a_head_of_another_model_is_refused(tmp_path: Path, llama: Path, glm: Path) -> None:
    for name, changes, problem in (
        ("narrow", {"target_hidden_size": 72}, "it reads states of the width 72, and the model has 144"),
        ("words", {"vocab_size": 130}, "a vocabulary of the size 130, and the model has 131"),
    ):
        head = make_eagle3(tmp_path / name, 144, **changes)
        with pytest.raises(ModelLoadError, match=problem), ring_of(tmp_path / f"of {name}", llama, head, dtype="fp32"):
            pass
    with pytest.raises(ModelLoadError, match="has no heads for multi-token"), ring_of(tmp_path, llama, "mtp"):
        pass


@natively
def test_native_kernels_do_without_the_states_of_layers(tmp_path: Path, llama: Path) -> None:
    head = make_eagle3(tmp_path / "head", 144)
    with ring_of(tmp_path, llama, head, dtype="bf16") as ring:
        assert not ring.spec.drafts
        assert "PyTorch computes the model" in ring.spec.draft_left_out

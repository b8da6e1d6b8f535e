"""Heads for multi-token prediction and EAGLE-3 checkpoints propose what their mathematics gives, and change no text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ModelLoadError
from shared.messages import SamplingParams
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.worker.draft_heads import (
    DEEPSEEK,
    MIMO,
    NEXT,
    QWEN,
    Eagle3Reference,
    MtpReference,
    Tensors,
    add_mtp_head,
    make_eagle3,
)
from tests.unit.executor.worker.drafting_ring import Generated, ring_of
from tests.unit.executor.worker.test_batched_drafts import generate
from tests.unit.executor.worker.test_draft_model import PROMPT, RANKS, model_in, natively, texts, told

GREEDY = SamplingParams(temperature=0.0)
SLOW = pytest.mark.slow
NIGHTLY = pytest.mark.nightly
BOTH = [pytest.param(1, marks=NIGHTLY), RANKS[-1]]  # two ranks compute all that one does
ONE = [1, pytest.param(2, marks=[natively, NIGHTLY])]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = model_in(tmp_path_factory.mktemp("glm"), None, "glm4_moe", hidden_size=96)
    add_mtp_head(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("llama"), num_hidden_layers=6)


def check(proposed: Generated, reference: Any) -> None:
    """Each proposal is the most likely token, with its probability, behind those before it."""
    assert len(proposed.rounds) > 3
    for tokens, found in proposed.rounds:
        for number, token in enumerate(found):
            logits = reference.proposal(tokens, [one.token for one in found[:number]])
            assert token.token == int(logits.argmax()), (len(tokens), number)
            assert token.probability == pytest.approx(float(logits.softmax(-1).max()), rel=1e-3)


HEADS = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), DEEPSEEK),
    "mimo_v2_flash": MIMO,
    "mellum": NEXT,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN),
}

ONE_OF_EACH = {"deepseek_v3", "mimo_v2_flash", "mellum", "qwen3_next"}  # kinds of names


@pytest.mark.parametrize("model_type", in_lanes(HEADS, ["mellum", "qwen3_next"], ONE_OF_EACH))
@pytest.mark.parametrize("tp", BOTH)
def test_a_models_own_head_computes_what_its_checkpoint_means(tmp_path: Path, model_type: str, tp: int) -> None:
    names = HEADS[model_type]
    directory = model_in(tmp_path / "model", None, model_type, **settings_of(model_type))
    add_mtp_head(directory, names=names, shared=names is not DEEPSEEK)
    with ring_of(tmp_path, directory, "mtp", tp=tp, dtype="fp32") as ring:
        assert ring.spec.drafts
        assert ring.spec.draft_reads_states
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
        behind = Generated(ring, PROMPT, GREEDY, 12, rewrites=True).run(16, 3, followed=False)
    check(found, MtpReference(directory, names))
    assert behind.text == found.text


@pytest.mark.parametrize("before", [False, True], ids=["residual of states", "residual of normed states"])
@pytest.mark.parametrize("tp", BOTH)
def test_an_eagle3_head_computes_what_its_checkpoint_means(tmp_path: Path, llama: Path, tp: int, before: bool) -> None:
    head = make_eagle3(tmp_path / "head", 144, norm_before_residual=before)
    with ring_of(tmp_path, llama, head, tp=tp, dtype="fp32") as ring:
        assert ring.spec.drafts
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
    check(found, Eagle3Reference(head, llama, (2, 3, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tp"),
    [
        ("fp32", 1),
        pytest.param("bf16", 2, marks=[natively, SLOW]),
        pytest.param("bf16", 1, marks=[natively, NIGHTLY]),
        pytest.param("fp32", 2, marks=[natively, NIGHTLY]),
    ],
)
def test_no_head_changes_a_text(tmp_path: Path, glm: Path, dtype: str, tp: int) -> None:
    with ring_of(tmp_path, glm, tp=tp, dtype=dtype) as ring:
        plain = told(texts(ring, 0))
    with ring_of(tmp_path, glm, "mtp", tp=tp, dtype=dtype) as ring:
        assert ring.spec.drafts
        assert ("native" in ring.spec.kernels) == (dtype == "bf16")
        assert told(texts(ring, 3)) == plain


def refused(place: Path, model: Path, head: Path | str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem), ring_of(place, model, head, dtype="fp32"):
        pass


# Changes of an EAGLE-3 head's configuration, and what is said of it.
BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "narrow": ({"target_hidden_size": 72}, "it reads states of the width 72, and the model has 144"),
    "words": ({"vocab_size": 130}, "it reads a vocabulary of the size 130, and the model has 131"),
    "deep": ({"num_hidden_layers": 2}, "has 2 layers of the type llama, and one of the type llama is computed"),
    "high": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, r"layers \[1, 2, 6\], and the model"),
    "few": ({"draft_vocab_size": 59}, "d2t .* does not name 59 tokens of 131 in ascending order"),
    "codes": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        "is quantized, which is not read",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_eagle3_head_of_another_model_is_refused(tmp_path: Path, llama: Path, what: str) -> None:
    changes, problem = BROKEN[what]
    refused(tmp_path, llama, make_eagle3(tmp_path / "head", 144, **changes), problem)


@pytest.mark.parametrize("lost", ["fc", "lm_head", "midlayer.hidden_norm"])
def test_an_eagle3_head_without_a_tensor_is_refused(tmp_path: Path, llama: Path, lost: str) -> None:
    weights = make_eagle3(tmp_path / "head", 144) / "model.safetensors"
    tensors = load_file(weights)
    del tensors[f"{lost}.weight"]
    save_file(tensors, weights, {"format": "pt"})
    refused(tmp_path, llama, tmp_path / "head", "tensor")


def test_a_model_without_a_head_that_is_computed_is_refused(tmp_path: Path, llama: Path) -> None:
    refused(tmp_path, llama, "mtp", "has no heads for multi-token prediction")
    other = model_in(tmp_path / "other")
    weights = other / "model.safetensors"
    save_file({**load_file(weights), "mtp.layers.0.eh_proj.weight": torch.zeros(4, 4)}, weights, {"format": "pt"})
    refused(tmp_path, other, "mtp", "of none of the kinds that are computed")
    add_mtp_head(other, lambda tensors: tensors.update({"more.weight": torch.zeros(2)}))
    refused(tmp_path, other, "mtp", "holds a tensor .*more.weight that is not known")


def test_an_eagle3_head_may_share_its_models_embeddings(tmp_path: Path, llama: Path) -> None:
    """They are as wide then."""
    head = make_eagle3(tmp_path / "head", 144, reduced=131, hidden_size=144)
    weights = head / "model.safetensors"
    tensors = load_file(weights)
    for name in ("embed_tokens.weight", "d2t", "t2d"):
        del tensors[name]
    save_file(tensors, weights, {"format": "pt"})
    with ring_of(tmp_path, llama, head, dtype="fp32") as ring:
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
    embedding = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    tensors |= {"embed_tokens.weight": embedding, "d2t": torch.zeros(131, dtype=torch.int64)}
    save_file(tensors, weights, {"format": "pt"})
    check(found, Eagle3Reference(head, llama, (2, 3, 3)))


def check_nearly(found: Generated, reference: Any) -> None:
    """In bf16 tokens that are as likely may change places."""
    assert len(found.rounds) > 3
    for tokens, proposed in found.rounds:
        logits = reference.proposal(tokens, [])
        assert float(logits.max() - logits[proposed[0].token]) < 0.3
        assert proposed[0].probability == pytest.approx(float(logits.softmax(-1).max()), rel=0.25)


@natively
def test_native_kernels_hand_over_what_they_norm_last(tmp_path: Path, glm: Path) -> None:
    with ring_of(tmp_path, glm, "mtp", dtype="bf16") as ring:
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
    check_nearly(found, MtpReference(glm))


@natively
@pytest.mark.parametrize("tp", ONE)
def test_native_kernels_hand_over_what_layers_read(tmp_path: Path, llama: Path, tp: int) -> None:
    head = make_eagle3(tmp_path / "head", 144)
    with ring_of(tmp_path / "plain", llama, tp=tp, dtype="bf16") as ring:
        plain = told(texts(ring, 0))
    with ring_of(tmp_path / "drafting", llama, head, tp=tp, dtype="bf16") as ring:
        assert ring.spec.drafts
        assert "native" in ring.spec.kernels
        assert told(texts(ring, 3)) == plain
    with ring_of(tmp_path / "drafting", llama, head, tp=tp, dtype="bf16") as ring:
        found = Generated(ring, PROMPT, GREEDY, rewrites=True).run(16, 3)
    check_nearly(found, Eagle3Reference(head, llama, (2, 3, 3)))


@pytest.fixture(scope="module")
def successions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last one alone, and whose head says the same of that one."""

    def know(head: Tensors, words: Tensors) -> None:
        head["eh_proj.weight"] = torch.cat((torch.eye(96), torch.zeros(96, 96)), dim=1)

    return successive(tmp_path_factory.mktemp("successions"), 0.5, know)


@pytest.fixture(scope="module")
def rememberer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, nearly always, whose head knows of no token: what follows the next one it reads off the state."""

    def know(head: Tensors, words: Tensors) -> None:
        head["eh_proj.weight"] = torch.cat((torch.zeros(96, 96), torch.eye(96)), dim=1)
        head["shared_head.head.weight"] = words["second"]

    return successive(tmp_path_factory.mktemp("rememberer"), 4.0, know)


def successive(directory: Path, sharpness: float, know: Callable[[Tensors, Tensors], None]) -> Path:
    model_in(directory, None, "glm4_moe", hidden_size=96, tie_word_embeddings=False, rms_norm_eps=1e-9)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    silence(tensors, "model.layers.")
    tensors["model.norm.weight"] = torch.ones(96)
    torch.manual_seed(3)
    before = torch.randperm(131)
    embedding = sharpness * tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding[before]
    save_file(tensors, weights, {"format": "pt"})

    def change(head: Tensors) -> None:
        silence(head, "")
        for name in ("enorm", "hnorm", "shared_head.norm"):
            head[f"{name}.weight"] = torch.ones(96)
        know(head, {"second": embedding[before[before]]})

    add_mtp_head(directory, change)
    return directory


def silence(tensors: Tensors, prefix: str) -> None:
    """Has layers add nothing."""
    for name in tensors:
        if name.startswith(prefix) and ("o_proj" in name or "down_proj" in name):
            tensors[name] = torch.zeros_like(tensors[name])


@pytest.mark.parametrize("tp", ONE)
@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=natively), "fp32"])
def test_a_head_that_knows_the_text_is_always_right(tmp_path: Path, successions: Path, dtype: str, tp: int) -> None:
    with ring_of(tmp_path, successions, "mtp", tp=tp, dtype=dtype) as ring:
        found = [
            Generated(ring, PROMPT, GREEDY).run(20, 4),
            Generated(ring, PROMPT, GREEDY, 12).run(20, 4, followed=False),
        ]
        if dtype == "fp32":  # in bf16 draws between tokens that are nearly as likely may differ
            found.append(Generated(ring, PROMPT, SamplingParams(temperature=1.0, seed=7), 24).run(20, 4))
    for sequence in found:
        assert sequence.accepted == sequence.proposed > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("fp32", "bf16"),
        pytest.param("bf16", "int8", marks=[natively, SLOW]),
        pytest.param("bf16", "bf16", marks=[natively, NIGHTLY]),
        pytest.param("fp32", "int8", marks=NIGHTLY),
    ],
)
def test_each_row_reads_the_state_of_the_one_before(
    tmp_path: Path, rememberer: Path, dtype: str, kv_dtype: str
) -> None:
    """Chunks, batches, blocks that are compressed, and prompts that find blocks: a wrong state is a wrong proposal."""
    with ring_of(tmp_path / "plain", rememberer, dtype=dtype, kv_dtype=kv_dtype) as ring:
        plain = generate(ring.engine, ring.spec, 0).turns
    with ring_of(tmp_path / "drafting", rememberer, "mtp", dtype=dtype, kv_dtype=kv_dtype) as ring:
        assert bool(ring.spec.num_quantized) == (kv_dtype == "int8")
        drafted, devoted, *_ = generate(ring.engine, ring.spec, 1)
    assert drafted == plain
    assert devoted.right > 100

"""Where PyTorch does not multiply bf16 fast, no product of bf16 is given to it, whatever the model is and is asked.

It computes such products there, hundreds of times slower. Which are computed is seen in its dispatch, so any machine
shows it: what is told of the processor is set.
"""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from services.executor.collectives.base import SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.model.card import encoder_config
from services.executor.model.dtypes import choose_dtype, precision, pytorch_dtype
from services.executor.native import library
from services.executor.platforms.cpu import Cpu, multiplies_bf16
from services.executor.worker.backends import cpu_kernels, native_runner
from services.executor.worker.encoder import load_encoder_rank
from shared.config import load_settings
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.executor.model.loading.quantized_weights import FORMS
from tests.unit.executor.model.loading.test_quantized_checkpoints import make_checkpoint
from tests.unit.executor.model.peft_adapters import save_adapter
from tests.unit.executor.model.ring import CPU, mixed_script
from tests.unit.executor.model.tiny import build
from tests.unit.executor.training.models import backward, batch_of, trainable
from tests.unit.executor.worker.draft_heads import add_mtp_head, make_eagle3
from tests.unit.executor.worker.drafting_ring import ring_of
from tests.unit.executor.worker.test_draft_model import model_in, natively, texts, told
from tests.unit.executor.worker.test_weights import model_of, runner_of, share_of

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear", "einsum", "convolution")
PARTS = ("attention", "_linear", "conv", "grouped_mm")  # of the names of others


class Bf16Products(TorchDispatchMode):
    """Names of the products with a bf16 operand that PyTorch is given in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS or any(part in name for part in PARTS):
            operands = [one for one in tree_leaves((args, kwargs or {})) if isinstance(one, torch.Tensor)]
            if any(one.dtype is torch.bfloat16 for one in operands):
                self.names.add(name)
        return func(*args, **(kwargs or {}))


def products_of(compute: Callable[[], object]) -> set[str]:
    with Bf16Products() as seen:
        compute()
    return seen.names


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What is told of the processor: one entry, which tests change."""
    told = [False]
    monkeypatch.setattr(Cpu, "has_fast_bf16", lambda self: told[0])
    return told


def steps_of(directory: Path, **settings: object) -> None:
    runner = runner_of(share_of(directory, **settings))
    for plan, _ in mixed_script()[1]:
        runner.forward(plan)


@pytest.mark.parametrize(
    ("flags", "multiplies"),
    [
        ("flags : fma avx2 f16c", False),
        ("flags : avx2 avx512f avx512bw avx512vl avx512_vnni", False),
        ("flags : avx2 avx_vnni avx_ne_convert", False),
        ("flags : avx2 avx512f avx512_bf16", True),
        ("flags : avx2 amx_bf16 amx_tile", True),
        ("Features : asimd asimddp", False),
        ("Features : asimd asimddp bf16", True),
    ],
)
def test_which_processors_multiply_bf16(flags: str, multiplies: bool) -> None:
    assert multiplies_bf16(f"processor : 0\n{flags}\n\nprocessor : 1\n{flags}\n") is multiplies


@pytest.mark.parametrize("bf16", [True, False])
def test_what_pytorch_computes_in(fast: list[bool], bf16: bool) -> None:
    fast[0] = bf16
    assert pytorch_dtype(torch.bfloat16, CPU) is (torch.bfloat16 if bf16 else torch.float32)
    assert pytorch_dtype(torch.bfloat16, torch.device("cuda")) is torch.bfloat16
    assert pytorch_dtype(torch.float32, CPU) is torch.float32
    assert precision("auto", "float32") is precision("fp32", torch.bfloat16) is torch.float32
    assert precision("auto", torch.float16) is precision("bf16", "float32") is torch.bfloat16


def test_products_are_seen_where_they_are_computed(fast: list[bool], tmp_path: Path) -> None:
    """Else the other tests would prove nothing."""
    fast[0] = True
    found = products_of(partial(steps_of, model_of(tmp_path, head_dim=16)))
    assert any("attention" in name for name in found)
    assert len(found) > 1


@pytest.mark.parametrize("asked", ["auto", "bf16"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3", "mamba2", "qwen3_moe"])
def test_models_by_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, asked: str) -> None:
    monkeypatch.setattr(native_runner, "load_library", lambda: None)
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    build(model_type, settings_of(model_type)).bfloat16().save_pretrained(str(tmp_path))
    assert products_of(partial(computed_alone, tmp_path, asked)) == set()


def computed_alone(directory: Path, asked: str) -> None:
    """On a store of the model's own shape."""
    with ring_of(directory, directory, dtype=asked) as ring:
        texts(ring, 0, 3)


@natively
def test_models_that_the_kernels_compute(tmp_path: Path) -> None:
    with_states = products_of(partial(steps_of, model_of(tmp_path, head_dim=32), dtype="bf16"))
    assert with_states == set()


@natively
@pytest.mark.parametrize("asked", ["auto", "bf16"])
@pytest.mark.parametrize("model_type", ["arcee", "qwen3_moe"])
def test_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_type: str, asked: str) -> None:
    """Of models by modules, whose codes the kernels multiply by."""
    monkeypatch.setattr(native_runner, "load_library", lambda: None)
    experts = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    checkpoint = make_checkpoint(tmp_path, model_type, FORMS["gptq"], **experts)
    config = checkpoint.quantized / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float16"}))
    with structlog.testing.capture_logs() as logged:
        assert products_of(partial(steps_of, checkpoint.quantized, dtype=asked)) == set()
    assert not any(line["event"] == "weights_unpacked" for line in logged)


@natively
def test_experts_by_modules_are_quantized_as_linears_are(tmp_path: Path) -> None:
    """Though all else is fp32."""
    build("afmoe", settings_of("afmoe")).bfloat16().save_pretrained(str(tmp_path))
    share = share_of(tmp_path, weight_dtype="q8_0")
    assert share.dtype is torch.float32
    held = {name for name, one in runner_of(share)._model.named_parameters() if one.dim() == 3 and one.numel()}
    assert held == set()


@pytest.mark.parametrize("asked", ["auto", "bf16"])
@pytest.mark.parametrize(
    ("model_type", "head"), [("bert", ""), ("gemma3_text", ""), ("modernbert", "classes"), ("bert", "classes")]
)
def test_encoders_and_classifiers(tmp_path: Path, model_type: str, head: str, asked: str) -> None:
    directory = make_encoder(tmp_path / "model", model_type, head, dtype="bfloat16")
    config = encoder_config(directory)

    def compute() -> None:
        settings = ExecutorSettings(model=str(directory), dtype=asked, block_size=16)
        load_encoder_rank(settings, config, directory, CPU, SingleRank(), lambda done, total: None)  # warms up

    assert products_of(compute) == set()


@pytest.mark.parametrize("kind", ["model", "encoder"])
def test_results_of_another_type_have_another_fingerprint(fast: list[bool], tmp_path: Path, kind: str) -> None:
    """As replicas of a model have on hosts with processors of several kinds."""
    directory = tmp_path / "model"
    if kind == "model":
        model_of(directory, head_dim=16)
    else:
        make_encoder(directory, "bert", dtype="bfloat16")
    found = set()
    for fast[0] in (False, True):
        with ring_of(tmp_path, directory, context_length=64) as ring:
            found.add(ring.spec.numerics)
    assert len(found) == 2


@pytest.mark.slow
@natively
@pytest.mark.parametrize("kind", ["model", "native model", "mtp", "eagle3"])
def test_drafts_beside_a_model_that_the_kernels_compute(tmp_path: Path, kind: str) -> None:
    draft: Path | str = "mtp"
    if kind == "mtp":
        model = model_in(tmp_path / "model", None, "glm4_moe", hidden_size=96)
        add_mtp_head(model)
    else:
        model = model_in(tmp_path / "model", num_hidden_layers=6)
        if kind == "eagle3":
            draft = make_eagle3(tmp_path / "head", 144)
        else:
            sizes = {"num_hidden_layers": 2, "head_dim": 16 if kind == "model" else 32}
            draft = model_in(tmp_path / "draft", **sizes)

    def compute() -> None:
        with ring_of(tmp_path, model, draft, dtype="bf16") as ring:
            assert ring.spec.drafts
            assert "native" in ring.spec.kernels
            texts(ring, 3, 8)

    assert products_of(compute) == set()


@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_adapters_beside_modules(tmp_path: Path, asked: str) -> None:
    directory = model_of(tmp_path / "base", head_dim=16)
    share = share_of(directory, dtype=asked)
    adapter, targets = tmp_path / "adapter", share.facts.adapter_targets
    save_adapter(AutoModelForCausalLM.from_pretrained(str(directory)), adapter, targets, 4)

    def compute() -> None:
        runner = runner_of(share)
        runner.serve_adapters(targets, share.dtype, 1, 4)
        plan = mixed_script()[1][0][0]
        count = len(plan.query_lens) // 4
        runner.forward(structs.replace(plan, adapters=to_bytes([0] * count), adapter_loads=[(0, str(adapter))]))

    assert products_of(compute) == set()


@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_training(tmp_path: Path, asked: str) -> None:
    directory = model_of(tmp_path / "base", head_dim=16)
    assert products_of(lambda: backward(trainable(directory, dtype=None, serving_dtype=asked), batch_of())) == set()


@natively
@pytest.mark.parametrize("kind", ["model", "encoder"])
def test_ranks_whose_processors_differ_compute_in_one_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """What each has computed is added: a ring's hosts may have processors of several kinds."""
    directory = tmp_path / "model"
    if kind == "model":
        model_of(directory, head_dim=16)
    else:
        make_encoder(directory, "bert", dtype="bfloat16")

    here = threading.current_thread()

    def computed(*fast: bool) -> object:
        """By ranks of whose processors this is told."""
        monkeypatch.setattr(Cpu, "has_fast_bf16", lambda self: fast[threading.current_thread() is not here])
        with ring_of(tmp_path, directory, tp=2, context_length=64) as ring:
            if kind == "model":
                return told(texts(ring, 0, 3))
            two = to_bytes([0, 1])
            plan = StepPlan(0, 0, two, two, two, to_bytes([2]), to_bytes([2]), b"", b"", pools=to_bytes([0, 2]))
            ring.engine.execute(plan, [])
            return ring.engine.pooled().tolist()

    alike = computed(False, False)
    assert computed(True, False) == computed(False, True) == alike


def test_encoders_of_a_decoders_family_are_not_taken_for_what_the_kernels_compute() -> None:
    config = type("Config", (), {"dtype": "bfloat16", "model_type": "gemma3_text"})()
    settings = load_settings(ExecutorSettings)
    assert choose_dtype(settings, CPU, config, by_kernels=False) is torch.float32
    if not library.why_not():
        assert choose_dtype(settings, CPU, config) is torch.bfloat16

"""What is refused, and at which point: by its configuration, or by a plan that cannot be followed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import HeadCounts, ShardLayout
from services.executor.families.plans import LLAMA_LIKE, Style
from services.executor.families.registry import DECODERS, ENCODERS
from services.executor.model.catalogue import REFUSED, check_supported, longest_context, refusal_of
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.parallel.module_patches import rewire_attention
from services.executor.model.parallel.plans import as_regex, plan_for
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import ARCHITECTURES, settings_of
from tests.unit.executor.model.ring import CPU, ThreadMember, ThreadRing
from tests.unit.executor.model.tiny import build

# The heads of the models of tiny.py.
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16}
LLAMA_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def refused(directory: Path, reason: str, world_size: int = 1) -> None:
    layout = ShardLayout.of(HeadCounts(9, 3, 16), world_size, 0)
    ring = SingleRank() if world_size == 1 else ThreadMember(ThreadRing(world_size), 0)
    with pytest.raises(ModelLoadError, match=reason) as raised:
        load_model(directory, torch.float32, layout, ring, CPU, lambda done, total: None)
    message = str(raised.value)
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantized by the method 'aqlm', which is not served"),
        ({"kv_lora_rank": 8}, "latent attention"),
        ({"layer_types": ["linear_attention"] * 3}, "layers of type linear_attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "layers of type chunked_attention"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"add_cross_attention": True}, "attends to an encoder"),
        ({"use_bidirectional_attention": True}, "looks ahead"),
    ],
)
def test_configurations_that_would_compute_something_else(copy: Path, changes: dict[str, object], reason: str) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    refused(copy, reason)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("xlnet", "two streams of the text"),
        ("t5", "has an encoder"),
        ("rembert", "both directions"),
        ("hrm_text", "its prompt in both directions"),
        ("llava", "not among those proven"),
    ],
)
def test_architectures_that_are_not_served(model_type: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        check_supported(CONFIG_MAPPING[model_type]())


def test_layers_of_several_types_are_named() -> None:
    with pytest.raises(ModelLoadError, match="several types, and its config"):
        check_supported(CONFIG_MAPPING["lfm2_moe"]())


def test_a_setting_that_transformers_does_not_compute() -> None:
    with pytest.raises(ModelLoadError, match="logit_scale"):
        check_supported(CONFIG_MAPPING["mpt"](logit_scale=0.5))


def test_weights_of_several_projections_in_one() -> None:
    with pytest.raises(ModelLoadError, match="projections in one weight"):
        check_supported(CONFIG_MAPPING["xlstm"](weight_mode="fused"))


def test_each_refused_architecture_exists_and_is_refused() -> None:
    for refusal in REFUSED:
        for model_type in refusal.model_types:
            assert model_type in CONFIG_MAPPING
            assert refusal_of(model_type) == refusal.because
    assert all(refusal_of(model_type) is None for model_type in DECODERS)


def test_every_causal_type_is_served_or_refused_with_its_reason_once() -> None:
    refused = [model_type for refusal in REFUSED for model_type in refusal.model_types]
    encoders = set(ENCODERS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    served = [*(name for name, family in DECODERS.items() if not family.listed_elsewhere), *encoders]
    assert sorted([*served, *refused]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with pytest.raises(ModelLoadError, match="made to read in one direction"):
        check_supported(CONFIG_MAPPING["bert"](is_decoder=True))


def test_every_plan_of_our_own_names_what_its_model_has() -> None:
    """A line that matches nothing is a layer that is replicated by mistake."""
    planned = {name: family.plan for name, family in DECODERS.items() if family.plan}
    for model_type, plan in planned.items():
        held: set[str] = set()
        for name in (name for name in ARCHITECTURES if name.partition("/")[0] == model_type):
            model = build(name, settings_of(name))
            held |= {full for full, _ in model.named_modules()} | {full for full, _ in model.named_parameters()}
        for pattern in plan:
            assert any(as_regex(pattern).fullmatch(full) for full in held), f"{model_type}: {pattern}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"layers.*.mlp.up_proj": "diagonal"}, "style 'diagonal' for layers.*.mlp.up_proj"),
        ({"layers.*.mlp.gate_up_proj": "colwise_gather_output"}, "style 'colwise_gather_output'"),
        ({"layers.*.self_attn.qkv_proj": "colwise"}, "style 'colwise' for layers.*.self_attn.qkv_proj"),
        ({"layers.*.self_attn.dt_proj": "rowwise"}, "for layers.*.self_attn.dt_proj"),
    ],
)
def test_plans_of_transformers_that_are_not_understood(line: dict[str, str], reason: str) -> None:
    config = AutoConfig.for_model("llama")
    config.base_model_tp_plan = {**LLAMA_PLAN, **line}
    with pytest.raises(ModelLoadError) as raised:
        plan_for(config)
    assert reason in str(raised.value)


def test_plans_of_transformers_under_old_and_new_names() -> None:
    config = AutoConfig.for_model("llama")
    for gathered, split in (("colwise_gather_output", "rowwise_split_input"), ("colwise_rep", "rowwise_rep")):
        config.base_model_tp_plan = {
            **LLAMA_PLAN,
            "layers.*.self_attn.q_proj": gathered,
            "layers.*.self_attn.o_proj": split,
            "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
            "embed_tokens": "embedding_rowwise",
        }
        plan = plan_for(config)
        assert plan["self_attn.q_proj"] is Style.QUERY
        assert plan["self_attn.o_proj"] is Style.OUTPUT
        assert plan["self_attn.q_norm"] is Style.WHOLE
        assert "embed_tokens" not in plan
    config.base_model_tp_plan = None
    with pytest.raises(ModelLoadError, match="no parallel plan"):
        plan_for(config)


def test_norms_over_all_heads_need_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("olmo2", {**settings_of("olmo2"), **NINE_HEADS}).save_pretrained(str(tmp_path))
    monkeypatch.setattr("services.executor.model.parallel.splitting.plan_for", lambda config: LLAMA_LIKE)
    refused(tmp_path, "spans several heads", world_size=2)


def test_layers_and_experts_of_another_make_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**LLAMA_LIKE, "mlp.act_fn": Style.COLUMN}
    monkeypatch.setattr("services.executor.model.parallel.splitting.plan_for", lambda config: plan)
    refused(llama, "mlp.act_fn, which is a SiLUActivation and not a plain linear layer")
    plan = {**LLAMA_LIKE, "mlp": Style.EXPERTS}
    refused(llama, "experts layers.0.mlp hold .*, a form that is not served")
    plan = {**LLAMA_LIKE, "mlp.up_proj": Style.QUERY}
    refused(llama, "is 96 wide where the heads in config.json make 144")
    plan = {**LLAMA_LIKE, "self_attn.q_norm": Style.QUERY_HEAD_NORM}
    build("olmo2", {**settings_of("olmo2"), **NINE_HEADS}).save_pretrained(str(tmp_path))
    refused(tmp_path, "which is not one row for each of 9 heads")
    plan = {"mlp.up_proj": Style.COLUMN}
    refused(llama, "0 attention layers that can be served where its configuration makes 3 of 3")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 4097.0},
        {"head_dim": 1 << 21},
        {"text_config": {"num_local_experts": 10**9}},
    ],
)
def test_sizes_without_end_are_refused_before_anything_is_built(tmp_path: Path, changes: dict[str, Any]) -> None:
    # The first kind has a list with an entry for each layer in its configuration already.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **changes}))
    with pytest.raises(ModelLoadError, match=r"and no model with more than \d+ is served"):
        load_config(tmp_path)


@pytest.mark.parametrize("rotary_dim", [3, 40, -2])
def test_rotations_of_no_part_of_a_head_are_refused(tmp_path: Path, rotary_dim: int) -> None:
    config = CONFIG_MAPPING["codegen"](**{**settings_of("codegen"), "rotary_dim": rotary_dim})
    attention = SimpleNamespace(qkv_proj=None)
    layout = ShardLayout.from_config(config, 1, 0)
    with pytest.raises(ModelLoadError, match=f"rotary_dim {rotary_dim}, which is no even part of a head of 8"):
        rewire_attention(torch.nn.Module(), config, {"0": attention}, layout)  # type: ignore[dict-item]


def test_doge_is_served_where_all_keys_are_attended_to() -> None:
    doge = CONFIG_MAPPING["doge"]
    assert longest_context(doge(max_position_embeddings=100, keep_window_size=70)) == 70
    assert longest_context(doge(max_position_embeddings=60, keep_window_size=70)) == 60
    with pytest.raises(ModelLoadError, match=r"experts by other tokens too \(is_moe\)"):
        check_supported(doge(is_moe=True))


@pytest.mark.parametrize("model_type", ["mamba", "recurrent_gemma", "rwkv", "xlstm"])
def test_context_length_of_models_that_do_not_limit_it(model_type: str) -> None:
    assert longest_context(CONFIG_MAPPING[model_type]()) == 131072


def test_kernels_that_a_configuration_names(tmp_path: Path) -> None:
    kernels = {"chunkwise_kernel": "chunkwise--triton_xl_chunk", "step_kernel": "triton"}
    described = {"model_type": "xlstm", "num_heads": 4, "hidden_size": 64, **kernels}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = load_config(tmp_path)
    check_supported(config)
    assert (config.num_heads, config.hidden_size) == (4, 64)


def test_context_length_of_models_without_position_embeddings() -> None:
    assert longest_context(CONFIG_MAPPING["bloom"](seq_length=77)) == 77
    with pytest.raises(ModelLoadError, match="max_position_embeddings"):
        longest_context(CONFIG_MAPPING["bloom"]())

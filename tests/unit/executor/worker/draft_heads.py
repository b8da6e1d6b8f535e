"""Random draft heads in the format of their checkpoints, and what plain torch computes with them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, Tensor]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def random(shape: tuple[int, ...], name: str = "") -> Tensor:
    spread = torch.randn(shape)
    return 1 + 0.1 * spread if "norm" in name else 0.12 * spread


# --- heads of the model's own checkpoint ---------------------------------------------------------


@dataclass(frozen=True)
class MtpNames:
    """What a checkpoint calls its head's tensors."""

    layer: str  # before those of the layer; `{}`: the number of the model's layers
    # Those that are called otherwise than DeepSeek V3's, by that name.
    others: dict[str, str] = field(default_factory=dict)
    like: int = -1  # the layer of the model that the head's is made like
    # Of the head's layer, where they are not those of the last one.
    kinds: dict[str, str] = field(default_factory=dict)
    config: dict[str, int] = field(default_factory=dict)
    centre: float = 0.0  # what norms add to their weights

    def of(self, short: str, layers: int) -> str:
        return self.others.get(short, self.layer.format(layers) + short)


DEEPSEEK = MtpNames("model.layers.{}.", config={"num_nextn_predict_layers": 1})
MIMO = MtpNames(
    "model.mtp.layers.0.",
    {
        "shared_head.norm.weight": "model.mtp.layers.0.final_layernorm.weight",
        "post_attention_layernorm.weight": "model.mtp.layers.0.pre_mlp_layernorm.weight",
    },
    like=0,
    kinds={"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
)
# Qwen3-Next's names, of Mellum 2.
NEXT = MtpNames(
    "mtp.layers.0.",
    {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "shared_head.norm.weight": "mtp.norm.weight",
    },
    like=1,
    kinds={"layer_types": "sliding_attention", "mlp_layer_types": "sparse"},
    config={"num_nextn_predict_layers": 1},
)
QWEN = replace(NEXT, kinds={"layer_types": "full_attention"}, config={"mtp_num_hidden_layers": 1}, centre=1.0)


def add_mtp_head(
    directory: Path,
    changes: Callable[[Tensors], None] = lambda tensors: None,
    names: MtpNames = DEEPSEEK,
    shared: bool = False,
) -> None:
    """Gives the model in `directory` a head, after `changes` of its tensors under DeepSeek V3's names. `shared`: the
    checkpoint has its embeddings and output layer as the model's alone."""
    path = directory / "config.json"
    described = json.loads(path.read_text())
    layers = described["num_hidden_layers"]
    path.write_text(json.dumps({**described, **names.config}))
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    like = f"model.layers.{names.like % layers}."
    torch.manual_seed(5)
    head = {
        name.removeprefix(like): random(tuple(tensor.shape), name)
        for name, tensor in tensors.items()
        if name.startswith(like)
    }
    hidden = described["hidden_size"]
    head |= {f"{name}.weight": random((hidden,), "norm") for name in ("enorm", "hnorm", "shared_head.norm")}
    head["eh_proj.weight"] = random((hidden, 2 * hidden))
    for name, source in (("shared_head.head", "lm_head"), ("embed_tokens", "model.embed_tokens")):
        if f"{source}.weight" in tensors and not shared:
            head[f"{name}.weight"] = tensors[f"{source}.weight"].clone()
    changes(head)
    head = {names.of(name, layers): tensor for name, tensor in one_by_one(head).items()}
    save_file({**tensors, **head}, weights, {"format": "pt"})


def one_by_one(tensors: Tensors) -> Tensors:
    """`tensors`, with those of experts as published checkpoints have them."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith("experts.gate_up_proj"):
            path = name.removesuffix("gate_up_proj")
            stacks = zip(found.pop(name), found.pop(f"{path}down_proj"), strict=True)
            for at, (both, down) in enumerate(stacks):
                gate, up = both.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
                found |= {f"{path}{at}.{part}.weight": weight.clone() for part, weight in parts.items()}
    return found


class MtpReference:
    """A sequence through the model and its head, all at once, by the head's own counting: the row of p reads h(p) and
    the token behind it."""

    def __init__(self, directory: Path, names: MtpNames = DEEPSEEK) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            str(directory), attn_implementation="eager", dtype=torch.float32
        )
        config = AutoConfig.from_pretrained(str(directory))
        layers = config.num_hidden_layers
        tensors = load_file(directory / "model.safetensors")
        back = {names.of(short, layers): short for short in (*_BESIDE, *names.others)}
        prefix = names.layer.format(layers)
        self.own = {
            back.get(name, name.removeprefix(prefix)): tensor
            for name, tensor in tensors.items()
            if name in back or name.startswith(prefix)
        }
        self.eps, self.centre = config.rms_norm_eps, names.centre
        self.block = _saved_as_last(directory, self.own, names)

    def proposal(self, tokens: list[int], drafted: list[int]) -> Tensor:
        """Logits behind `tokens`, the last of which the model has not computed, and proposals behind it."""
        with torch.inference_mode():
            states = self.model.model(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state[0]
            ids = [*tokens[1:], *drafted]
            embedding = self.own.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
            while True:
                embedded = embedding[torch.tensor(ids[: len(states)])]
                mixed = torch.cat(
                    (
                        normed(embedded, self.own["enorm.weight"] + self.centre, self.eps),
                        normed(states, self.own["hnorm.weight"] + self.centre, self.eps),
                    ),
                    dim=-1,
                )
                x = linear(mixed, self.own["eh_proj.weight"])
                made = self.block(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
                if len(states) == len(ids):
                    return linear(made[-1], self.own.get("shared_head.head.weight", self.model.lm_head.weight))
                states = torch.cat((states, made[-1:]))


_BESIDE = [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]


def _saved_as_last(directory: Path, own: Tensors, names: MtpNames) -> Any:
    """The head's layer and norm as transformers computes them: a model of one layer."""
    config = AutoConfig.from_pretrained(str(directory))
    config.num_hidden_layers = 1
    config.first_k_dense_replace, config.mlp_only_layers = 0, []
    config.tie_word_embeddings = False
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := getattr(config, name, None):
            setattr(config, name, [names.kinds.get(name, kinds[-1])])
    place = directory / "of_head"
    config.save_pretrained(str(place))
    tensors = {
        f"model.layers.0.{name}": tensor
        for name, tensor in own.items()
        if name.split(".")[0] not in ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    }
    whole = load_file(directory / "model.safetensors")
    tensors |= {
        "model.norm.weight": own["shared_head.norm.weight"],
        "model.embed_tokens.weight": whole["model.embed_tokens.weight"],
        "lm_head.weight": whole.get("lm_head.weight", whole["model.embed_tokens.weight"]).clone(),
    }
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(str(place), attn_implementation="eager", dtype=torch.float32)
    return model.model


# --- EAGLE-3 -------------------------------------------------------------------------------------

EAGLE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}


def make_eagle3(directory: Path, width: int, vocab_size: int = 131, reduced: int = 60, **changes: Any) -> Path:
    """For a model whose states are `width` wide."""
    directory.mkdir(parents=True)
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **EAGLE,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "draft_vocab_size": reduced,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "target_hidden_size": width,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(described))
    torch.manual_seed(6)
    hidden, heads = int(described["hidden_size"]), EAGLE["num_attention_heads"] * 16
    shapes = {
        "fc": (hidden, 3 * width),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (32, 2 * hidden),
        "midlayer.self_attn.v_proj": (32, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (80, hidden),
        "midlayer.mlp.up_proj": (80, hidden),
        "midlayer.mlp.down_proj": (hidden, 80),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "lm_head": (reduced, hidden),
        "embed_tokens": (vocab_size, hidden),
    }
    tensors = {f"{name}.weight": random(shape, name) for name, shape in shapes.items()}
    chosen = torch.randperm(vocab_size)[:reduced].sort().values
    tensors["d2t"] = chosen - torch.arange(reduced)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


class Eagle3Reference:
    def __init__(self, directory: Path, model: Path, layers: tuple[int, int, int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(str(model), attn_implementation="eager", dtype=torch.float32)
        self.own = {
            name.removeprefix("midlayer.").removesuffix(".weight"): tensor
            for name, tensor in load_file(directory / "model.safetensors").items()
        }
        self.described = json.loads((directory / "config.json").read_text())
        self.layers = layers

    def proposal(self, tokens: list[int], drafted: list[int]) -> Tensor:
        """As `MtpReference.proposal`; minus infinity for tokens that the head does not have."""
        with torch.inference_mode():
            all_states = self.model(
                torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True
            ).hidden_states
            states = linear(torch.cat([all_states[one][0] for one in self.layers], dim=-1), self.own["fc"])
            ids = [*tokens[1:], *drafted]
            while True:
                made = self._layer(self.own["embed_tokens"][torch.tensor(ids[: len(states)])], states)
                if len(states) == len(ids):
                    break
                states = torch.cat((states, made[-1:]))
            own = linear(normed(made[-1], self.own["norm"], 1e-5), self.own["lm_head"])
            whole = torch.full((self.described["vocab_size"],), float("-inf"))
            whole[self.own["d2t"] + torch.arange(len(own))] = own
            return whole

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        own, count = self.own, len(states)
        of_states = normed(states, own["hidden_norm"], 1e-5)
        residual = of_states if self.described.get("norm_before_residual") else states
        read = torch.cat((normed(embedded, own["input_layernorm"], 1e-5), of_states), dim=-1)
        query, key, value = (
            linear(read, own[f"self_attn.{name}_proj"]).view(count, -1, 16).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
        cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))

        def turned(x: Tensor) -> Tensor:
            return x * cos + torch.cat((-x[..., 8:], x[..., :8]), dim=-1) * sin

        key, value = (part.repeat_interleave(3, dim=0) for part in (turned(key), value))
        attended = scaled_dot_product_attention(turned(query), key, value, is_causal=True)
        x = residual + linear(attended.transpose(0, 1).flatten(1), own["self_attn.o_proj"])
        inner = normed(x, own["post_attention_layernorm"], 1e-5)
        up = silu(linear(inner, own["mlp.gate_proj"])) * linear(inner, own["mlp.up_proj"])
        return x + linear(up, own["mlp.down_proj"])

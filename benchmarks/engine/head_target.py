"""A model whose draft heads are right as often as wanted: for benchmarks of these.

`python -m benchmarks.engine.head_target SMALL_MODEL DIRECTORY` writes it in bf16, with layers of the small one's sizes:

    DIRECTORY           what follows a token is what a random order of the vocabulary has next, or another one: as the
                        noise of the layers decides; with a head for multi-token prediction that says what the first has
    DIRECTORY/eagle3    an EAGLE-3 head that says the same

A token of the model costs `times` as many bytes of weights as one of its own head. How large the noise is decides how
often model and heads say the same, and is found by trying. The texts mean nothing; what they cost is what they would
cost of any model of these sizes.

    python -m benchmarks.engine.speculation DIRECTORY --draft mtp --loads words
    python -m benchmarks.engine.speculation DIRECTORY --draft DIRECTORY/eagle3 --loads words --dtype fp32
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from benchmarks.engine.noisy_target import (
    LENGTH,
    Right,
    Target,
    Times,
    config_of,
    first_layer,
    fit,
    tensors_of,
    write_description,
)
from benchmarks.errors import BenchError
from benchmarks.harness import Threads, run

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)
_SHARPNESS = 0.125
"""Of the output layer: the logits of other tokens differ by a few."""
_SECOND = 0.9
"""Of what the second order says, to the first. Two that are close keep noise that all texts have in common from
deciding for the same few tokens everywhere."""
_FOCUS = 2.0
"""Of the EAGLE-3 head's keys and queries: a row attends to itself, and to the same token elsewhere."""
_FIRST, _OF_HEAD = "model.layers.0.", "mtp.layers.0."
_ADDS = ("o_proj.weight", "down_proj.weight")
Tensors = dict[str, torch.Tensor]


def make(small: Path, directory: Path, times: float, right: float, threads: int) -> float:
    """Makes the model; returns how often its head says what it does. Raises BenchError where the small one is not of
    the kind, and where the directory is not empty."""
    config = config_of(small)
    if directory.exists() and any(directory.iterdir()):
        raise BenchError(f"{directory} holds something already; give a directory that is new.")
    like = _layer(first_layer(tensors_of(small, tied=True)), config)
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    random = torch.Generator().manual_seed(3)
    following, others = (torch.randperm(vocabulary, generator=random) for _ in range(2))
    one, last = sum(tensor.numel() for tensor in like.values()), vocabulary * hidden
    layers = max(1, round((times * (one + 2 * hidden**2 + last) - last) / one))
    write_description(small, directory, _described(config, layers))
    words = torch.randn((vocabulary, hidden), generator=random)
    output = torch.empty_like(words)
    output[following] = _SHARPNESS * words
    output[others] += _SECOND * _SHARPNESS * words
    ends = {
        "model.embed_tokens.weight": words,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": output,
    }
    _save(ends, directory / "ends.safetensors")
    _save(_own_head(like, hidden), directory / "head.safetensors")
    _write_eagle3(directory / "eagle3", config, output)
    target = Target(directory, like, 0, layers)
    target.write_inner()
    text = torch.randint(vocabulary, (LENGTH,), generator=random)
    return fit(target, text.tolist(), following[text].numpy(), right, threads)


def _layer(first: Tensors, config: dict[str, Any]) -> Tensors:
    """As of the first one of the small model, for the architecture that is made."""
    head = torch.ones(_head_dim(config), dtype=torch.bfloat16)
    return {**first, **{f"{_FIRST}self_attn.{name}_norm.weight": head for name in "qk"}}


def _head_dim(config: dict[str, Any]) -> int:
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def _described(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Mellum 2's without experts."""
    rotation = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        **{name: config[name] for name in _SIZES if name in config},
        "head_dim": _head_dim(config),
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "mlp_layer_types": ["dense"] * layers,
        "rope_parameters": {"full_attention": rotation, "sliding_attention": rotation},
        "num_nextn_predict_layers": 1,
        "mtp_layer_types": ["full_attention"],
        "mtp_mlp_layer_types": ["dense"],
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _own_head(like: Tensors, hidden: int) -> Tensors:
    tensors = {
        name.replace(_FIRST, _OF_HEAD): torch.zeros_like(tensor) if name.endswith(_ADDS) else tensor
        for name, tensor in like.items()
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.ones(hidden)
    return {**tensors, "mtp.fc.weight": _beside_zeros(torch.eye(hidden))}


def _write_eagle3(directory: Path, config: dict[str, Any], output: torch.Tensor) -> None:
    """Its layer adds the embedding of a row's own token to what it has of states, which is nothing."""
    directory.mkdir(exist_ok=True)
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    described = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: config[name] for name in _SIZES if name in config},
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(described))
    own = _beside_zeros(torch.eye(hidden))
    layer = {
        "self_attn.q_proj": _FOCUS * own,
        "self_attn.k_proj": _FOCUS * own,
        "self_attn.v_proj": own,
        "self_attn.o_proj": torch.eye(hidden),
        "mlp.gate_proj": torch.zeros(inner, hidden),
        "mlp.up_proj": torch.zeros(inner, hidden),
        "mlp.down_proj": torch.zeros(hidden, inner),
    }
    layer |= dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), torch.ones(hidden))
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": torch.zeros(hidden, 3 * hidden), "norm.weight": torch.ones(hidden)}
    _save({**tensors, "lm_head.weight": output}, directory / "model.safetensors")


def _beside_zeros(matrix: torch.Tensor) -> torch.Tensor:
    return torch.cat((matrix, torch.zeros_like(matrix)), dim=1)


def _save(tensors: Tensors, path: Path) -> None:
    own = {name: tensor.to(torch.bfloat16, copy=True) for name, tensor in tensors.items()}
    save_file(own, path, {"format": "pt"})


def main(
    small: Annotated[Path, typer.Argument(help="The directory of a Llama.")],
    directory: Annotated[Path, typer.Argument(help="Where the model is written.")],
    times: Times = 10.0,
    right: Right = 0.7,
    threads: Threads = 2,
) -> None:
    """Makes a model whose own head drafts."""
    found = make(small, directory, times, right, threads)
    typer.echo(f"{directory}: its head says the same in {found:.0%}")


if __name__ == "__main__":
    run(main)

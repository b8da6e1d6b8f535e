"""What a model computes before it was converted, and after: logits of a fixed text, by transformers in float32."""

import math
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import torch
from torch import Tensor

from services.executor.model.conversion.convert import open_model
from services.executor.model.conversion.models import SourceModel, empty_model, tokens_of
from shared.errors import ModelLoadError

_TOKENS = 512  # of the text that are read; their logits are held twice, of 256,000 tokens 1 GB
_FEWEST = 2
_CHARACTERS = 16_384


class Comparison(msgspec.Struct, frozen=True):
    """How far two models are apart."""

    tokens: int  # that were read
    same_tokens: bool  # whether both tokenizers make the same of the text
    same_top: float  # share of the positions whose most likely next token is the same
    largest: float  # difference of any logit
    perplexity: tuple[float, float]  # before and after


def compare(source: Path, target: Path, report: Callable[[str, int, int], None]) -> Comparison:
    """Holds one of the models in memory, in float32, and then the other. Raises `ModelLoadError`."""
    report("checking", 0, 2)
    with open_model(source) as model:
        ids = _ids(model)
        if len(ids) < _FEWEST:
            raise ModelLoadError(f"The tokenizer of {source} makes {len(ids)} tokens of a text; it cannot be compared.")
        before = _logits(model, ids)
    report("checking", 1, 2)
    with open_model(target) as model:
        same = _ids(model) == ids
        after = _logits(model, ids)
    report("checking", 2, 2)
    known = torch.tensor(ids[1:])
    losses = [float(torch.nn.functional.cross_entropy(one[:-1], known)) for one in (before, after)]
    return Comparison(
        tokens=len(ids),
        same_tokens=same,
        same_top=float((before.argmax(1) == after.argmax(1)).float().mean()),
        largest=float((before - after).abs().max()),
        perplexity=(math.exp(losses[0]), math.exp(losses[1])),
    )


def _ids(model: SourceModel) -> list[int]:
    text = "\n\n".join(topics[name] for name in sorted(topics))[:_CHARACTERS]
    return tokens_of(model, text)[:_TOKENS]


@torch.inference_mode()
def _logits(model: SourceModel, ids: list[int]) -> Tensor:
    """float32 [tokens, vocabulary]"""
    computed = empty_model(model.config, torch.float32)
    if model.gguf is not None:
        model.gguf.scale_frequencies(computed)
    held = {one.name: torch.cat([piece.float() for piece in one.pieces()]).view(one.shape) for one in model.tensors}
    found = computed.load_state_dict(held, strict=False, assign=True)
    computed.tie_weights()
    missing = [name for name, tensor in computed.named_parameters() if tensor.is_meta]
    if missing or found.unexpected_keys:
        name = [*missing, *found.unexpected_keys][0]
        raise ModelLoadError(f"The model in {model.directory} has the tensor {name} otherwise; it cannot be compared.")
    logits: Tensor = computed.eval()(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits

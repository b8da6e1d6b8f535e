"""Codes that are chosen by what a layer computes of a text: GPTQ (https://arxiv.org/abs/2210.17323).

    text ─▶ embedding ─▶ layer 0 ─▶ layer 1 ─▶ ...         a layer's weights are in memory, and what comes into it
           products of its inputs ─▶ its codes ─▶ what it makes of the text with them comes into the next

A weight's inputs are rounded one after the other, those that count most first; for the error of each those that are
left make up. Scales and zero points are the ones that rounding to the nearest has, so a reader sees no difference.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from services.executor.model.conversion.models import SourceModel, SourceTensor, empty_model, tokens_of
from services.executor.model.quantized import QuantizedRows
from shared.errors import ConfigurationError, ModelLoadError

_LENGTH = 512  # tokens of a sequence
_SEQUENCES = 32  # their states are held in float32: 16,384 tokens, 270 MB with 4,096 values each
_FEWEST = 4
_CHARACTERS = 1 << 20  # of the text that are read
_BLOCK = 128  # inputs whose errors are passed on together
# Parts of the mean of a matrix' diagonal that are added to it, until it can be inverted.
_DAMPING = (0.01, 0.1, 1.0)

Round = Callable[[SourceTensor], QuantizedRows]
_Settings = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with beside the states


class Calibration:
    """Quantizes the weights of a model's layers, asked for in the order of the layers."""

    def __init__(self, model: SourceModel, text: Path, rounded: Round, report: Callable[[str, int, int], None]):
        """Scales and zero points are those of `rounded`. Raises `ConfigurationError` and `ModelLoadError`."""
        self._tensors = {tensor.name: tensor for tensor in model.tensors}
        self._rounded = rounded
        self._report = report
        self._sequences = _sequences(model, text)
        self._model = empty_model(model.config, torch.float32)
        if model.gguf is not None:
            model.gguf.scale_frequencies(self._model)
        decoder = self._model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelLoadError(
                f"Models of type {model.config.model_type!r} are not calibrated, for their layers are not found; leave "
                "out --calibrate."
            )
        self._layers: nn.ModuleList = layers
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self._states: Tensor | None = None
        self._settings: list[_Settings] = []
        self._next = 0  # the layer that `_states` come into
        self._held: dict[str, QuantizedRows] = {}
        self.directory: Path | None = None  # where the states are kept for a run that goes on with this one's

    def rows(self, tensor: SourceTensor) -> QuantizedRows:
        """The weight `tensor`. Raises `ModelLoadError`."""
        layer = self._layer_of(tensor.name)
        if layer is None:
            return self._rounded(tensor)
        if tensor.name not in self._held:
            if self._states is None:
                self._begin(layer)
            while self._next <= layer:
                self._quantize_next()
        return self._held[tensor.name]

    def _layer_of(self, name: str) -> int | None:
        before = self._names[id(self._layers)] + "."
        return int(name.removeprefix(before).split(".")[0]) if name.startswith(before) else None

    @torch.inference_mode()
    def _begin(self, layer: int) -> None:
        """Computes what comes into the first layer, or takes what comes into `layer` where that is kept."""
        first, self._settings = self._inputs()
        self._states, self._next = first, 0
        kept = self._kept(layer)
        if kept is not None and kept.exists():
            try:
                states = load_file(kept)["states"]
            except (OSError, KeyError, SafetensorError):  # a run that was killed had not written it whole
                return
            if states.shape == first.shape:
                self._states, self._next = states, layer

    def _kept(self, layer: int) -> Path | None:
        return None if self.directory is None else self.directory / f"layer-{layer}.states"

    def _inputs(self) -> tuple[Tensor, list[_Settings]]:
        """(states [sequences, tokens, hidden] that come into the first layer, what else each layer is called with)"""
        decoder = self._model.get_decoder()
        self._fill(decoder, keep=lambda name: not name.startswith(self._names[id(self._layers)]))
        taken: list[Tensor] = []
        settings: list[_Settings] = []

        class Recorder(nn.Module):
            def __init__(self, layer: nn.Module) -> None:
                super().__init__()
                self.layer = [layer]  # not a submodule

            def __getattr__(self, name: str) -> Any:
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.layer[0], name)

            def forward(self, states: Tensor, *more: Any, **named: Any) -> Tensor:
                if self is recorders[0]:
                    taken.append(states[0])
                if len(settings) < len(recorders):
                    settings.append((more, named))
                return states

        recorders = [Recorder(layer) for layer in self._layers]
        decoder.layers = nn.ModuleList(recorders)
        try:
            for sequence in self._sequences:
                decoder(sequence.unsqueeze(0), use_cache=False)
        finally:
            decoder.layers = self._layers
        for child in decoder.children():
            if child is not self._layers:
                child.to("meta")
        return torch.stack(taken), settings

    def _fill(self, module: nn.Module, keep: Callable[[str], bool] = lambda name: True) -> None:
        """Gives `module` its weights, in float32."""
        before = self._names[id(module)] + "."
        wanted = [name for name, _ in module.named_parameters() if keep(before + name)]
        if missing := [name for name in wanted if before + name not in self._tensors]:
            raise ModelLoadError(
                f"The checkpoint has no tensor {before}{missing[0]}, as the model names it, so it is not calibrated; "
                "leave out --calibrate."
            )
        held = {name: torch.cat([piece.float() for piece in self._tensors[before + name].pieces()]) for name in wanted}
        module.load_state_dict(held, strict=False, assign=True)

    @torch.inference_mode()
    def _quantize_next(self) -> None:
        self._report("calibrating", self._next, len(self._layers))
        assert self._states is not None, "it has begun"
        self._keep_states()
        layer = self._layers[self._next]
        self._fill(layer)
        self._held = {}
        for linears, products in self._products(layer).values():
            for linear in linears:
                name = f"{self._names[id(linear)]}.weight"
                rows = self._rounded(self._tensors[name])
                self._held[name] = replace(rows, codes=codes_of(linear.weight, products, rows))
                linear.weight = nn.Parameter(self._held[name].dequantized(), requires_grad=False)
        for number, states in enumerate(self._states):
            self._states[number] = self._run(layer, states)
        layer.to("meta")
        self._next += 1
        self._report("calibrating", self._next, len(self._layers))

    def _keep_states(self) -> None:
        """For a run that begins with this layer."""
        kept = self._kept(self._next)
        if kept is not None and not kept.exists():
            assert self._states is not None, "it has begun"
            made = kept.with_suffix(".new")
            save_file({"states": self._states.contiguous()}, made)
            made.replace(kept)
            if self._next:
                self._kept(self._next - 1).unlink(missing_ok=True)  # type: ignore[union-attr]

    def _products(self, layer: nn.Module) -> dict[int, tuple[list[nn.Linear], Tensor]]:
        """For each input of linear layers: those that take it, and the products of its values with each other, summed
        over the tokens, float32 [in, in]."""
        found: dict[int, tuple[list[nn.Linear], Tensor]] = {}
        seen: list[Tensor] = []

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values = inputs[0]
            number = next((number for number, one in enumerate(seen) if one is values), len(seen))
            if number == len(seen):
                seen.append(values)
                flat = values.flatten(0, -2)
                if number in found:
                    found[number][1].addmm_(flat.T, flat)
                else:
                    found[number] = ([], flat.T @ flat)
            assert isinstance(module, nn.Linear)
            if module not in found[number][0]:
                found[number][0].append(module)

        hooks = [module.register_forward_pre_hook(note) for module in layer.modules() if isinstance(module, nn.Linear)]
        for states in self._states if self._states is not None else ():
            seen.clear()
            self._run(layer, states)
        for hook in hooks:
            hook.remove()
        return found

    def _run(self, layer: nn.Module, states: Tensor) -> Tensor:
        more, named = self._settings[self._next]
        made = layer(states.unsqueeze(0), *more, **named)
        one: Tensor = made if isinstance(made, Tensor) else made[0]
        return one[0]


def codes_of(weight: Tensor, products: Tensor, rows: QuantizedRows) -> Tensor:
    """uint8 [out, in]: codes for `weight` under the scales of `rows` which keep what it makes of its inputs.

    `products` [in, in] are their products with each other, summed.
    """
    outputs, inputs = weight.shape
    order = products.diagonal().argsort(descending=True, stable=True)
    groups = order // rows.group
    most = (1 << rows.bits) - 1
    scales, zeros = rows.scales.float(), torch.full_like(rows.scales, rows.offset, dtype=torch.float32)
    zeros = zeros if rows.zeros is None else rows.zeros.float()
    upper = _inverse_factor(products[order][:, order])
    left = weight[:, order].clone()
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    for first in range(0, inputs, _BLOCK):
        end = min(first + _BLOCK, inputs)
        errors = torch.empty(outputs, end - first)
        for at in range(first, end):
            scale, zero = scales[:, groups[at]], zeros[:, groups[at]]
            inverse = torch.where(scale == 0, 0.0, 1 / scale)
            code = (left[:, at] * inverse).round_().add_(zero).clamp_(0, most)
            codes[:, order[at]] = code.to(torch.uint8)
            error = (left[:, at] - (code - zero) * scale) / upper[at, at]
            left[:, at:end].addr_(error, upper[at, at:end], alpha=-1)
            errors[:, at - first] = error
        left[:, end:].addmm_(errors, upper[first:end, end:], alpha=-1)
    return codes


def _inverse_factor(products: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, damped so that there is one. Raises `ModelLoadError`."""
    diagonal = products.diagonal()
    products = products + torch.diag((diagonal == 0).to(products.dtype))
    for damping in _DAMPING:
        damped = products + torch.eye(len(products)) * (damping * products.diagonal().mean())
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                made: Tensor = upper
                return made
    raise ModelLoadError(
        "What the model makes of the text is not finite, so it cannot be calibrated; leave out --calibrate, or give "
        "another text."
    )


def _sequences(model: SourceModel, text: Path) -> list[Tensor]:
    """int64 [tokens] each, spread over the text. Raises `ConfigurationError`."""
    try:
        with text.open(encoding="utf-8") as file:
            content = file.read(_CHARACTERS)
    except UnicodeDecodeError:
        raise ConfigurationError(f"The file {text} is not UTF-8 text; give one that is to --calibrate.") from None
    except OSError as error:
        raise ConfigurationError(
            f"The text {text} cannot be read ({error.strerror}); give another to --calibrate."
        ) from None
    ids = torch.tensor(tokens_of(model, content))
    count = len(ids) // _LENGTH
    if count < _FEWEST:
        raise ConfigurationError(
            f"The text {text} has {len(ids):,} tokens of this model, too few to calibrate with; give one of at least "
            f"{_FEWEST * _LENGTH:,}, better {_SEQUENCES * _LENGTH:,}."
        )
    step = max(1.0, count / _SEQUENCES)
    starts = [int(number * step) * _LENGTH for number in range(min(count, _SEQUENCES))]
    return [ids[start : start + _LENGTH] for start in starts]

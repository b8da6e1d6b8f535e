"""Layers with recurrent state in plain PyTorch: transformers' own modules, called over the sequences' slots.

transformers calls such a module with the texts of a batch side by side; a step has its tokens end to end. So each
module is called once for all decodes, and once for each chunk of a prompt:

    step      [ d0 d1 d2 | p3 p3 p3 p3 | p4 p4 ]
    decodes   [3, 1, hidden]  ─▶ module ─▶  [3, 1, hidden]     states of three slots, side by side
    chunk 3   [1, 4, hidden]  ─▶ module ─▶  [1, 4, hidden]     the state of one

and finds its state where transformers has it: in an object in the place of the cache, which hands out copies of the
slots' tensors, `conv`, `recurrent` (`conv.1`, ... where a layer has several), that go back when the call is over.
A chunk is cut after each row for which a snapshot is wanted.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.model.step_context import RecurrentBatch, RecurrentPiece, StepContext

# What modules call the argument in which they expect a cache.
_CACHES = ("cache_params", "past_key_values", "past_key_value", "cache")
_OURS = frozenset({"step", "attention_mask"})

# What a module returns: [n, T, ...] for each token, alone or in a tuple with what is not by tokens.
Outputs = Any


class StateCache:
    """In the place of transformers' cache, for one call of one layer."""

    def __init__(self, tensors: Mapping[str, Tensor], *, fresh: bool) -> None:
        """`tensors`: [n, *shape] of each tensor of the layer's slots, which the call changes in place; `fresh`: they
        are zeros, because the sequence begins."""
        self.tensors = tensors
        self._fresh = fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._fresh else self.tensors[_name("conv", state_idx)]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **others: object) -> Tensor:
        """The window and `conv_states` [n, channels, T] after it: [n, channels, window + T]."""
        window = self.tensors[_name("conv", state_idx)]
        known = torch.cat((window.to(conv_states.dtype), conv_states), dim=-1)
        window.copy_(known[..., known.shape[-1] - window.shape[-1] :])
        return known

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._fresh else self.tensors[_name("recurrent", state_idx)]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: object
    ) -> Tensor:
        return self.tensors[_name("recurrent", state_idx)].copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return not self._fresh

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._fresh else 1


def _name(tensor: str, index: int) -> str:
    return f"{tensor}.{index}" if index else tensor


class CurrentStep:
    """The step that a model computes, for those of its modules that are not handed it."""

    def __init__(self, model: nn.Module) -> None:
        self.step: StepContext | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, module: nn.Module, arguments: object, named: dict[str, Any]) -> None:
        self.step = named["step"]


def keep_in_slots(module: nn.Module, layer: int, current: CurrentStep, prefix: str = "") -> None:
    """Has `module`, whose state is in the slots of the `layer`-th layer with recurrent state, compute whole steps.

    `prefix`: what the names of its tensors begin with, where others of the layer keep some too; it finds them by the
    rest."""
    compute = module.forward
    parameters = list(inspect.signature(compute).parameters)
    cache = next(name for name in _CACHES if name in parameters)

    def call(hidden: Tensor, others: dict[str, Any], states: StateCache) -> Outputs:
        return compute(**{parameters[0]: hidden, **others, cache: states})

    def forward(*arguments: Any, **named: Any) -> Outputs:
        assert current.step is not None, "a module is called by its model"
        values = {**dict(zip(parameters, arguments, strict=False)), **named}
        hidden = values.pop(parameters[0])
        others = {name: value for name, value in values.items() if name not in _OURS and name != cache}
        store = current.step.store.states
        assert store is not None, "the store was made without slots"
        tensors = {
            name.removeprefix(prefix): tensor
            for name, tensor in store.tensors(layer).items()
            if name.startswith(prefix)
        }
        return _over_step(call, hidden, others, current.step, tensors)

    module.forward = forward


def _over_step(
    call: Callable[[Tensor, dict[str, Any], StateCache], Outputs],
    hidden: Tensor,
    others: dict[str, Any],
    step: StepContext,
    tensors: Mapping[str, Tensor],
) -> Outputs:
    """What the module makes of `hidden` [1, T, width], all sequences of the step; `tensors`: its state in all slots."""
    batch = step.recurrent
    parts: list[Outputs] = []
    decodes = batch.slots.shape[0]
    if decodes:
        rows = _rows(others, hidden.shape[1], 0, decodes, side_by_side=True)
        states = _gathered(tensors, batch)
        step.narrow(0, decodes)
        made = call(hidden[0, :decodes].unsqueeze(1), rows, StateCache(states, fresh=False))
        parts.append(_end_to_end(made, decodes))
        for name, tensor in tensors.items():
            tensor[batch.slots] = states[name]
            for source, copy in batch.copies:
                tensor[copy] = tensor[source]
    for piece in batch.pieces:
        rows = _rows(others, hidden.shape[1], piece.start, piece.stop, side_by_side=False)
        step.narrow(piece.start, piece.stop)
        parts.append(call(hidden[:, piece.start : piece.stop], rows, _cache_of(tensors, piece)))
        for tensor in tensors.values():
            for copy in piece.copies:
                tensor[copy] = tensor[piece.slot]
    step.narrow(0, hidden.shape[1])
    step.on_layer()
    return _joined(parts)


def _gathered(tensors: Mapping[str, Tensor], batch: RecurrentBatch) -> dict[str, Tensor]:
    """[D, *shape] of each tensor, zeros for those that begin."""
    states = {name: tensor.index_select(0, batch.slots) for name, tensor in tensors.items()}
    for state in states.values():
        state[batch.fresh] = 0
    return states


def _cache_of(tensors: Mapping[str, Tensor], piece: RecurrentPiece) -> StateCache:
    """Over the slot itself."""
    own = {name: tensor[piece.slot : piece.slot + 1] for name, tensor in tensors.items()}
    if piece.fresh:
        for tensor in own.values():
            tensor.zero_()
    return StateCache(own, fresh=piece.fresh)


def _end_to_end(made: Outputs, decodes: int) -> Outputs:
    """What is [D, 1, ...] of the decodes, side by side, as [1, D, ...]."""
    if isinstance(made, tuple):
        return tuple(_end_to_end(part, decodes) for part in made)
    by_token = isinstance(made, Tensor) and made.shape[:2] == (decodes, 1)
    return made.transpose(0, 1) if by_token else made


def _joined(parts: list[Outputs]) -> Outputs:
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(parts, dim=1) if isinstance(first, Tensor) else first


def _rows(others: dict[str, Any], tokens: int, start: int, stop: int, *, side_by_side: bool) -> dict[str, Any]:
    """Arguments for rows [start, stop): what has a value for each of the step's `tokens`, [1, T, ...], is cut."""
    return {name: _cut(value, tokens, start, stop, side_by_side) for name, value in others.items()}


def _cut(value: Any, tokens: int, start: int, stop: int, side_by_side: bool) -> Any:
    if isinstance(value, tuple):
        return tuple(_cut(part, tokens, start, stop, side_by_side) for part in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (1, tokens):
        return value
    part = value[:, start:stop]
    return part.transpose(0, 1) if side_by_side else part


# The tensor with the tokens before: float32 counts whole numbers to 2**24, more than vocabularies have.
_NGRAM_TOKENS = "conv.2"


def remember_tokens(embedding: Any) -> None:
    """Has `embedding`, Qwen 4's of a token with those before it, find the tokens before a call in the slots.

    transformers' module is called with them in front, and what it makes of these is dropped. A slot keeps each as its
    distance to the end-of-text token, so that zeros, which a sequence begins with, stand for what transformers puts
    before the first.
    """
    embedding.forward = partial(_embed, embedding, embedding.forward)


def _embed(embedding: Any, compute: Any, input_ids: Tensor, past_key_values: StateCache) -> Tensor:
    """`input_ids` int64 [n, T]: [n, T, width]."""
    kept, end = past_key_values.tensors[_NGRAM_TOKENS], embedding.eos_token_id
    tokens = torch.cat((kept.long() + end, input_ids), dim=1)
    kept.copy_(tokens[:, tokens.shape[1] - kept.shape[1] :] - end)
    made: Tensor = compute(tokens, None)[:, kept.shape[1] :]
    return made

"""Draft models of one layer that read the hidden states of the model that is served: its own heads for multi-token
prediction, and EAGLE-3 checkpoints. PyTorch computes them.

A head's row at position p stands for the token there and the state of the one before it, so that it is computed, kept
and read where a draft model's row of that token would be:

    MTP       x = project [norm(embedding of t(p)) | norm(h(p - 1))]            h: behind the last norm
    EAGLE-3   g = project [low | middle | high](p - 1)                          what three layers of the model read
              the layer's keys, queries and values read [norm(embedding) | norm(g)], and it adds to g

    layer ─▶ norm ─▶ output layer: t(p + 1)       own state: behind the norm (MTP), before it (EAGLE-3)

Checkpoints count such a row as that of p - 1, and know none of position 0: rows are turned as they count, and nobody
attends to the first. A pass behind a proposal reads the head's own state in place of the model's, which is not there
yet.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2, https://arxiv.org/abs/2412.19437; Li et al.,
"EAGLE-3", https://arxiv.org/abs/2503.01840. What is handed over between passes is what transformers' `MtpModel`
does, and for EAGLE-3 what vLLM does.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from services.executor.core.sharding import ShardRange, split_dimension
from services.executor.model.parallel.layers import (
    ColumnParallelLinear,
    LinearShard,
    TensorSlice,
    VocabParallelHead,
    hold,
)
from services.executor.model.step_context import StepContext

# Logit of a token that a head cannot propose: finite, as those of a rank that holds no other are too.
NEVER = -1e30


def whole_linear(inputs: int, outputs: int, dtype: torch.dtype) -> ColumnParallelLinear:
    """A linear layer without bias that every rank computes whole, without memory yet."""
    linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
    return ColumnParallelLinear(linear, ShardRange(0, outputs))


class HeadModel(nn.Module):
    """One rank's share of a head, around a causal language model of one layer that computes it. `ModelRunner` calls it
    as it calls any model."""

    width: int  # of the states that it reads
    first_seen: ClassVar[int] = 1  # position 0 is no row of the checkpoint's

    def __init__(self, model: Any, hidden: int) -> None:
        super().__init__()
        self.model = model
        self.hidden = hidden
        self.made = torch.empty(0)  # the states [T, hidden] that its last forward pass has computed
        self._states: Tensor | None = None

    @contextmanager
    def reading(self, states: Tensor) -> Iterator[None]:
        """Its rows read `states` [T, hidden]; outside they read zeros."""
        self._states = states
        try:
            yield
        finally:
            self._states = None

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    @abstractmethod
    def taken(self, states: Tensor) -> Tensor:
        """What is kept of the model's states [T, width]: [T, hidden]."""

    @abstractmethod
    def combined(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What its layer reads of embeddings and states, [1, T, hidden] all three."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, step: StepContext, **others: Any
    ) -> Any:
        """As transformers' models, over flat batches [1, T]."""
        step.first_seen = self.first_seen
        embedded = self.model.get_input_embeddings()(input_ids)
        states = embedded.new_zeros(*input_ids.shape, self.hidden)
        if self._states is not None:
            states = self._states.to(embedded).unsqueeze(0)
        return self.model(
            inputs_embeds=self.combined(embedded, states),
            position_ids=(position_ids - 1).clamp(min=0),
            logits_to_keep=logits_to_keep,
            step=step,
            **others,
        )

    def _make(self, states: Any) -> None:
        self.made = states[0]


class MtpHead(HeadModel):
    """A head for multi-token prediction: its parts as DeepSeek V3 calls them."""

    def __init__(self, model: Any, hidden: int, norms: Sequence[nn.Module], dtype: torch.dtype) -> None:
        """`norms`: of embeddings and of states."""
        super().__init__(model, hidden)
        self.width = hidden
        self.enorm, self.hnorm = norms
        self.eh_proj = whole_linear(2 * hidden, hidden, dtype)
        model.base_model.norm.register_forward_hook(lambda module, given, made: self._make(made))

    def taken(self, states: Tensor) -> Tensor:
        return states

    def combined(self, embedded: Tensor, states: Tensor) -> Tensor:
        mixed: Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), dim=-1))
        return mixed


class Eagle3Norms(nn.Module):
    """In the place of the layer's first norm: [1, T, hidden] -> [1, T, 2 * hidden]."""

    def __init__(self, of_embeddings: nn.Module, of_states: nn.Module, *, normed: bool) -> None:
        """`normed`: whether the states that come are normed already, as is what the layer adds to."""
        super().__init__()
        self.of_embeddings, self.of_states = of_embeddings, of_states
        self.normed = normed
        self.embedded = torch.empty(0)  # of the forward pass

    @property
    def weight(self) -> Tensor:
        """That of states, which a decoder of ours takes for the layer's first norm."""
        weight: Tensor = self.of_states.weight  # type: ignore[assignment]  # a norm's
        return weight

    def forward(self, states: Tensor) -> Tensor:
        own = states if self.normed else self.of_states(states)
        return torch.cat((self.of_embeddings(self.embedded), own), dim=-1)


class Eagle3Head(HeadModel):
    def __init__(self, model: Any, hidden: int, norms: Eagle3Norms, width: int, dtype: torch.dtype) -> None:
        """`width`: of the three layers' states together."""
        super().__init__(model, hidden)
        self.width = width
        self.fc = whole_linear(width, hidden, dtype)
        self._norms = [norms]  # the layer has it
        model.base_model.norm.register_forward_pre_hook(lambda module, given: self._make(given[0]))

    @property
    def norms(self) -> "Eagle3Norms":
        return self._norms[0]

    def taken(self, states: Tensor) -> Tensor:
        projected: Tensor = self.fc(states.to(self.model.dtype))
        return projected

    def combined(self, embedded: Tensor, states: Tensor) -> Tensor:
        self.norms.embedded = embedded
        normed: Tensor = self.norms.of_states(states) if self.norms.normed else states
        return normed


class ReducedHead(VocabParallelHead):
    """An output layer of few tokens of the vocabulary: the local logits of all, `NEVER` for the others."""

    places: Tensor  # int64: of its own tokens among those of the rank

    def __init__(
        self, head: nn.Linear, targets: NDArray[np.int64], vocab_size: int, rank: int, world_size: int
    ) -> None:
        """`targets`: the tokens of its rows, ascending. A rank holds those of its share of the vocabulary."""
        LinearShard.__init__(self)
        spans = split_dimension(vocab_size, world_size)
        self.widths = [span.size for span in spans]
        first, stop = np.searchsorted(targets, [spans[rank].start, spans[rank].stop]).tolist()
        hold(self, "weight", head.weight, TensorSlice(0, (ShardRange(first, stop),), len(targets)))
        self.register_parameter("bias", None)
        own = torch.from_numpy(targets[first:stop] - spans[rank].start)
        self.register_buffer("places", own, persistent=False)
        self._width = spans[rank].size

    def forward(self, hidden: Tensor) -> Tensor:
        logits = hidden.new_full((*hidden.shape[:-1], self._width), NEVER)
        logits[..., self.places] = self.multiply(hidden)
        return logits


# --- the states of the model that is served ------------------------------------------------------


class StateTaps:
    """Takes the states that a head reads out of a forward pass of transformers' modules."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: whose inputs are taken, side by side; none: what comes behind the last norm."""
        self._layers = layers

    @contextmanager
    def watching(self, model: Any) -> Iterator[list[Tensor]]:
        """The list has the states [T, width] of each, once the pass in the context is over."""
        found: dict[int, Tensor] = {}
        states: list[Tensor] = []
        base = model.base_model
        if self._layers:
            handles = [
                base.layers[layer].register_forward_pre_hook(self._before(found, at), with_kwargs=True)
                for at, layer in enumerate(self._layers)
            ]
        else:
            handles = [base.register_forward_hook(lambda module, given, made: found.update({0: made[0]}))]
        try:
            yield states
            states += [found[at][0] for at in range(len(found))]
        finally:
            for handle in handles:
                handle.remove()

    @staticmethod
    def _before(found: dict[int, Tensor], at: int) -> Any:
        def keep(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            found[at] = given[0] if given else named["hidden_states"]

        return keep

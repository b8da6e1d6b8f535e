"""A draft head's layer by the GPU's decoder, so that its passes are replayed from CUDA graphs.

    MTP        residual = project [norm(embedding) | norm(state)]    the layer reads    norm(residual)
    EAGLE-3    residual = state, or norm(state)                      [norm(embedding) | norm(state)]

The states come in `StepInputs.states`; what `model/draft_heads.py` says of rows and positions holds here. Its own state
is what the layer leaves: behind the last norm (MTP), before it (EAGLE-3).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.graphs import GraphedDecoder
from services.executor.gpu.inputs import StepInputs
from services.executor.gpu.kernels import elementwise
from services.executor.gpu.linear import make_product
from services.executor.kv_cache.store import KvStore
from services.executor.model.draft_heads import NEVER, Eagle3Head, HeadModel, MtpHead, ReducedHead
from services.executor.model.lowering import Lowered, norm_weight, weights_of
from services.executor.model.products import Product


class GpuHead(GpuDecoder):
    """Holds the weights of one rank's share of a head."""

    first_seen = HeadModel.first_seen

    def __init__(
        self, head: HeadModel, lowered: Lowered, store: KvStore, layout: ShardLayout, collectives: Collectives
    ) -> None:
        """`lowered`: of the model of one layer in `head`."""
        places = head.get_output_embeddings()
        super().__init__(lowered, store, layout, collectives)
        self.states_width = head.hidden
        assert isinstance(head, MtpHead | Eagle3Head), "there is no other kind"
        self._begins = _Mtp(head, lowered) if isinstance(head, MtpHead) else _Eagle3(head, lowered)
        self.taken = head.taken  # see `HeadModel.taken`
        # As `AuxHiddenStates` has them: where its own states are.
        self.made_layers = () if isinstance(head, MtpHead) else (len(lowered.layers),)
        self._places = places.places if isinstance(places, ReducedHead) else None
        self._share = places.widths[collectives.rank]

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        logits = super().logits(hidden, rows)
        if self._places is None:
            return logits
        whole = logits.new_full((len(logits), self._share), NEVER)
        return whole.index_copy_(1, self._places, logits)

    def _begin(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        embedded = self._embed(inputs.token_ids)
        states = inputs.states
        if states is None:
            states = embedded.new_zeros((len(embedded), self.states_width))
        return self._begins(embedded, states.to(embedded), self._norms, self._layers[0].norms["attention_norm"])

    def _rotations(self, positions: Tensor) -> list[elementwise.Rotation]:
        return super()._rotations((positions - 1).clamp(min=0))


class _Mtp:
    def __init__(self, head: MtpHead, lowered: Lowered) -> None:
        self._of_embeddings = norm_weight(head.enorm, lowered.family)
        self._of_states = norm_weight(head.hnorm, lowered.family)
        self._project: Product = make_product(*weights_of(head.eh_proj))

    def __call__(
        self, embedded: Tensor, states: Tensor, norms: elementwise.Norms, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = (
            elementwise.norm(embedded, self._of_embeddings, norms),
            elementwise.norm(states, self._of_states, norms),
        )
        residual = self._project(torch.cat(parts, dim=1))
        return residual, elementwise.norm(residual, weight, norms)


class _Eagle3:
    def __init__(self, head: Eagle3Head, lowered: Lowered) -> None:
        self._of_embeddings = norm_weight(head.norms.of_embeddings, lowered.family)
        self._normed = head.norms.normed

    def __call__(
        self, embedded: Tensor, states: Tensor, norms: elementwise.Norms, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = elementwise.norm(states, weight, norms)
        read = torch.cat((elementwise.norm(embedded, self._of_embeddings, norms), normed), dim=1)
        return normed if self._normed else states.clone(), read


class GraphedHead:
    """What `HeadModel` is to whoever hands states to a head and takes its own, of one that `decoder` computes."""

    def __init__(self, head: GpuHead, decoder: GraphedDecoder) -> None:
        """`decoder`: around `head`, with graphs that are still to be captured."""
        self.hidden = head.states_width
        self._head, self._decoder = head, decoder
        decoder.tap(head.made_layers)

    @property
    def made(self) -> Tensor:
        states = self._decoder.tapped
        assert states is not None, "no step was computed"
        return states

    def taken(self, states: Tensor) -> Tensor:
        return self._head.taken(states)

    @contextmanager
    def reading(self, states: Tensor) -> Iterator[None]:
        self._decoder.input_states = states
        try:
            yield
        finally:
            self._decoder.input_states = None

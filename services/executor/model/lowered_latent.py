"""Latent attention, lowered: what `native/latent.h` computes with, of one rank's heads."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from services.executor.model.lowered_recurrent import CannotLower, OutputRows
from services.executor.model.parallel.layers import LatentWeight, LinearShard


@dataclass(frozen=True)
class LatentShape:
    """The numbers of `rz_latent` (`native/decoder.h`)."""

    query_rank: int
    plain: int
    rotated: int
    rank: int
    value_dim: int
    pairs: bool  # what is turned comes in pairs, and is kept in halves
    position_span: int
    position_growth: float
    query_eps: float
    eps: float


@dataclass(frozen=True)
class Latent:
    """A layer whose heads all attend to one line of a token."""

    weight: LatentWeight
    shape: LatentShape
    inputs: list[OutputRows]  # what it projects: queries or their latents, then the line
    query_b: LinearShard | None  # of query latents
    # float32: `norm` [rank] and, where there are query latents, `query_norm` [query_rank]
    norms: dict[str, Tensor]

    @property
    def of_keys(self) -> Tensor:
        """[heads * rank, plain]: what makes a query, for lines, of its plain part."""
        return self.weight.of_keys.transpose(1, 2).flatten(0, 1).contiguous()

    @property
    def of_values(self) -> Tensor:
        """[heads * value_dim, rank]"""
        return self.weight.of_values.flatten(0, 1).contiguous()


def lower_latent(attention: Any, config: Any) -> Latent:
    """Raises `CannotLower` where `attention` is built of other layers."""
    weight, query_b = attention.kv_b_proj, getattr(attention, "q_b_proj", None)
    first = attention.q_proj if query_b is None else attention.q_a_proj
    linears = [first, attention.kv_a_proj_with_mqa, attention.o_proj, *([] if query_b is None else [query_b])]
    if not isinstance(weight, LatentWeight) or not all(isinstance(one, LinearShard) for one in linears):
        raise CannotLower(f"a {type(attention).__name__} is built of other layers")
    norms = {"norm": attention.kv_a_layernorm}
    if query_b is not None:
        norms["query_norm"] = attention.q_a_layernorm
    rope = config.rope_parameters
    growth = float(rope.get("llama_4_scaling_beta") or 0.0)
    shape = LatentShape(
        query_rank=0 if query_b is None else query_b.stored.shape[1],
        plain=int(attention.qk_nope_head_dim),
        rotated=weight.rotated,
        rank=weight.rank,
        value_dim=weight.value_width,
        pairs=bool(getattr(config, "rope_interleave", False)),
        position_span=int(rope["original_max_position_embeddings"]) if growth else 0,
        position_growth=growth,
        query_eps=_eps_of(norms.get("query_norm")),
        eps=_eps_of(norms["norm"]),
    )
    return Latent(
        weight=weight,
        shape=shape,
        inputs=[OutputRows.all(first), OutputRows.all(attention.kv_a_proj_with_mqa)],
        query_b=query_b,
        norms={name: norm.weight.detach().float().contiguous() for name, norm in norms.items()},
    )


def _eps_of(norm: nn.Module | None) -> float:
    return 0.0 if norm is None else float(norm.variance_epsilon)  # type: ignore[arg-type]

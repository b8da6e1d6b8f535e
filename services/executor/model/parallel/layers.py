"""Linear, embedding and norm layers that hold one rank's share of their weights.

Each layer says which slice of the checkpoint's tensor it wants, so that the loader reads nothing else.

    column parallel    weight rows split      x whole -> y split
    row parallel       weight columns split   x split -> y partial, summed over the ranks
    vocabulary         rows split             ids -> partial rows, summed; hidden -> local logits

Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.

Norms of queries and keys:

    wide norm     over all heads' values at once: the ranks add up the squares of theirs
    head norms    within each head, with weights of its own: a rank keeps those of its heads
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout, ShardRange, split_dimension
from services.executor.model.quantized import DeferredRows, QuantizedRows
from services.executor.model.weight_formats import CodedWeight, Quantized, Weight, packed_product
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class TensorSlice:
    """`spans` of dimension `dim`, end to end, of a checkpoint tensor whose size there is `full`.

    A plain share is one span; a share of fused projections (q, k and v in one tensor) is one of each.
    """

    dim: int
    spans: tuple[ShardRange, ...]
    full: int
    transposed: bool = False  # whether the checkpoint holds the tensor, of two dimensions, the other way

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


def shifted(span: ShardRange, by: int) -> ShardRange:
    return ShardRange(span.start + by, span.stop + by)


def halves(span: ShardRange, width: int) -> tuple[ShardRange, ...]:
    """`span` of each of two projections of `width` that stand one after the other."""
    return merged([span, shifted(span, width)])


def merged(spans: list[ShardRange]) -> tuple[ShardRange, ...]:
    """The same rows with neighbours joined, so that they are read at once."""
    joined: list[ShardRange] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = ShardRange(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


_SLICES = "slices"
_ELSEWHERE = "elsewhere"
_QUANTIZED = "quantized_experts"
_STORED = "stored_experts"
_PRODUCTS = "expert_products"


def hold(module: nn.Module, name: str, like: Tensor, piece: TensorSlice) -> None:
    """Makes parameter `name` of `module` this rank's `piece` of `like`, without memory yet.

    `module` may be transformers' own: what it holds is noted in it, for `piece_of`.
    """
    shape = list(like.shape)
    shape[piece.dim] = piece.size
    empty = torch.empty(shape, dtype=like.dtype, device="meta")
    setattr(module, name, nn.Parameter(empty, requires_grad=False))
    slices: dict[str, TensorSlice] = module.__dict__.setdefault(_SLICES, {})
    slices[name] = piece


def held_transposed(module: nn.Module) -> None:
    """Notes that the checkpoint holds the weight the other way."""
    slices: dict[str, TensorSlice] = module.__dict__[_SLICES]
    slices["weight"] = replace(slices["weight"], transposed=True)


def leave_out(module: nn.Module, name: str) -> None:
    """Notes that the checkpoint's `name` under `module`'s own is held by other ranks only."""
    module.__dict__[_ELSEWHERE] = held_elsewhere(module) | {name}


def piece_of(module: nn.Module, name: str) -> TensorSlice | None:
    """What of the checkpoint's tensor of that name `module` holds as parameter `name`; None: all of it."""
    slices: dict[str, TensorSlice] = module.__dict__.get(_SLICES, {})
    return slices.get(name)


def held_elsewhere(module: nn.Module) -> frozenset[str]:
    """What the checkpoint holds under `module`'s name that other ranks hold for all."""
    names: frozenset[str] = module.__dict__.get(_ELSEWHERE, frozenset())
    return names


EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")  # of all experts of a layer, as transformers names them


@dataclass(frozen=True)
class StoredExperts:
    """How files, and codes, hold a parameter; of experts it may be otherwise than their module does."""

    outputs_first: bool = False  # [experts, out, in], where the module has [experts, in, out]
    halves: bool = False  # all gate values before all up values, which take turns in the module

    @classmethod
    def of(cls, module: Any, name: str, halves: bool) -> Self:
        """Of parameter `name` of `module` in files that have outputs first; `halves`: and all gate values before all up
        values."""
        first = name in EXPERT_WEIGHTS and bool(getattr(module, "is_transposed", False))
        joined = halves and name.startswith(EXPERT_WEIGHTS[0]) and not getattr(module, "is_concatenated", True)
        return cls(first, joined)

    def shape(self, shape: list[int]) -> list[int]:
        """The files', of the module's `shape`."""
        return [shape[0], *reversed(shape[1:])] if self.outputs_first else shape

    def piece(self, piece: TensorSlice) -> TensorSlice:
        """The files', of the module's `piece`."""
        dim = {1: 2, 2: 1}[piece.dim] if self.outputs_first else piece.dim
        if not self.halves:
            return replace(piece, dim=dim)
        spans = [ShardRange(span.start // 2, span.stop // 2) for span in piece.spans]
        width = piece.full // 2
        return replace(piece, dim=dim, spans=tuple(merged([*spans, *(shifted(span, width) for span in spans)])))

    def restored(self, held: Tensor) -> Tensor:
        """The module's parameter, of the files'."""
        held = torch.stack(held.chunk(2, dim=1), dim=2).flatten(1, 2) if self.halves else held
        return held.transpose(1, 2).contiguous() if self.outputs_first else held


def holds_experts(module: nn.Module, name: str) -> bool:
    """Whether parameter `name` of `module` has the weights [out, in] of all experts, which may be quantised as one:
    transformers' own module, which holds some the other way, or with more than weights."""
    more = ("is_transposed", "has_bias", "has_post_expert_norm")
    plain = getattr(module, "is_concatenated", False) and not any(getattr(module, one, True) for one in more)
    return name in ("up_proj", *EXPERT_WEIGHTS) and plain and hasattr(module, name)  # some have no gate


LIKE_MODULE = StoredExperts()


def keep_quantized_experts(
    module: nn.Module, name: str, weight: "CodedWeight | None", stored: StoredExperts = LIKE_MODULE
) -> None:
    """Holds `weight` [experts * out, in], in the order of `stored`, in place of the plain one; None: neither."""
    plain: nn.Parameter = getattr(module, name)
    module.__dict__.setdefault(_STORED, {})[name] = stored
    setattr(module, name, nn.Parameter(torch.empty(0, dtype=plain.dtype), requires_grad=False))
    module.__dict__.setdefault(_QUANTIZED, {})[name] = weight


def expert_weight_of(module: nn.Module, name: str) -> "Tensor | CodedWeight":
    """The weights of all experts as they were loaded: plain [experts, out, in], or quantised [experts * out, in]."""
    kept: CodedWeight | None = module.__dict__.get(_QUANTIZED, {}).get(name)
    plain: Tensor = getattr(module, name)
    return plain if kept is None else kept


def quantized_experts(module: nn.Module) -> "dict[str, CodedWeight]":
    """The weights that `keep_quantized_experts` holds in `module`, by parameter."""
    return {name: kept for name, kept in module.__dict__.get(_QUANTIZED, {}).items() if kept is not None}


def stored_of(module: nn.Module, name: str) -> StoredExperts:
    """The order of what `keep_quantized_experts` was given."""
    stored: StoredExperts = module.__dict__.get(_STORED, {}).get(name, LIKE_MODULE)
    return stored


def multiply_experts_by(module: nn.Module, name: str, products: list[Callable[[Tensor], Tensor]]) -> None:
    """From now on `expert_product` multiplies by `products`, [T, in] -> [T, out] of each expert."""
    module.__dict__.setdefault(_PRODUCTS, {})[name] = products


def expert_product(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """`x` [T, in] times the weight of `expert`, plus its bias, if it has one: [T, out]."""
    bias = getattr(module, f"{name}_bias")[expert] if getattr(module, "has_bias", False) else None
    if (products := module.__dict__.get(_PRODUCTS, {}).get(name)) is not None:
        made: Tensor = products[expert](x)
        return made if bias is None else made + bias
    weight = getattr(module, name)[expert]
    return functional.linear(x, weight.T if module.is_transposed else weight, bias)


def takes_turns(module: nn.Module, name: str) -> bool:
    """Whether gate and up values of `expert_weight_of` take turns, where that is quantised."""
    concatenated: bool = getattr(module, "is_concatenated", True)
    return name == EXPERT_WEIGHTS[0] and not concatenated and not stored_of(module, name).halves


def unpack_experts(model: nn.Module) -> None:
    """Makes plain weights of those of experts that are quantised, and not packed yet, for models that PyTorch computes;
    on the device of what is plain."""
    device = next((kept.device for kept in model.parameters() if kept.numel()), None)
    for module in model.modules():
        for name, kept in quantized_experts(module).items():
            assert isinstance(kept, Quantized | DeferredRows | QuantizedRows), "others are what a device's kernels read"
            count: int = module.num_experts  # type: ignore[assignment]  # of transformers' own
            outputs, inputs = kept.shape[0] // count, kept.shape[1]
            experts = torch.empty((count, outputs, inputs), dtype=getattr(module, name).dtype, device=device)
            for expert in range(count):
                rows = kept.rows(expert * outputs, (expert + 1) * outputs)
                experts[expert] = (rows.read() if isinstance(rows, DeferredRows) else rows).dequantized()
            setattr(module, name, nn.Parameter(stored_of(module, name).restored(experts), requires_grad=False))
        for held in (_QUANTIZED, _STORED):
            module.__dict__.pop(held, None)


class WeightShard(nn.Module):
    """A layer whose weight may be quantised."""

    weight: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        self._quantized: CodedWeight | None = None

    @property
    def stored(self) -> Weight:
        """The weight [out, in] as it was loaded: plain or quantised."""
        return self.weight if self._quantized is None else self._quantized

    def keep_quantized(self, weight: CodedWeight | None) -> None:
        """Holds `weight` in place of the plain one, which is empty from now on; None: lets go of it."""
        self._quantized = weight
        self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)


class LinearShard(WeightShard):
    """A rank's share of a linear layer, and the product with it."""

    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self._packed: Tensor | None = None
        self._product: Callable[[Tensor], Tensor] | None = None
        self._added: Callable[[Tensor, Tensor], Tensor] | None = None

    def add_to_products(self, added: Callable[[Tensor, Tensor], Tensor]) -> None:
        """From now on `multiply` returns what `added` makes of `x` and its product, before ranks are summed."""
        self._added = added

    def multiply_by(self, product: Callable[[Tensor], Tensor]) -> None:
        """From now on multiplies by `product`, [T, in] -> [T, out], which holds weight and bias."""
        self._product = product

    def pack(self, packed: Tensor, keep_plain: bool) -> None:
        """From now on multiplies with `packed` (`packed_weight`); the plain weight goes unless it is kept."""
        self._packed = packed
        if not keep_plain:
            self.weight = nn.Parameter(torch.empty(0, dtype=self.weight.dtype), requires_grad=False)

    def multiply(self, x: Tensor) -> Tensor:
        """`x` [..., in] times the share, plus its bias and what was asked to be added: [..., out]."""
        product = self._multiply(x)
        return product if self._added is None else self._added(x, product)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._product is not None:
            made = self._product(x.reshape(-1, x.shape[-1]))
            return made.view(*x.shape[:-1], made.shape[1])
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        return packed_product(x, self._packed, self.bias)


class ColumnParallelLinear(LinearShard):
    """`spans` of a linear layer's outputs, end to end. [..., in] -> [..., spans]."""

    def __init__(self, linear: nn.Linear, *spans: ShardRange):
        super().__init__()
        piece = TensorSlice(0, spans, linear.out_features)
        hold(self, "weight", linear.weight, piece)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            hold(self, "bias", linear.bias, piece)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class RowParallelLinear(LinearShard):
    """`span` of a linear layer's inputs, or several end to end, summed over the ranks. [..., span] -> [..., out].

    What it is given may be wider: it begins `skip` values before the span. Rank 0 alone holds the bias: added
    on every rank, it would count once per rank.
    """

    def __init__(
        self, linear: nn.Linear, span: ShardRange | tuple[ShardRange, ...], collectives: Collectives, skip: int = 0
    ):
        super().__init__()
        self._collectives = collectives
        piece = TensorSlice(1, (span,) if isinstance(span, ShardRange) else span, linear.in_features)
        self._taken = slice(skip, skip + piece.size)
        hold(self, "weight", linear.weight, piece)
        self.register_parameter("bias", None)
        bias: Tensor | None = getattr(linear, "bias", None)
        if bias is not None and collectives.rank == 0:
            hold(self, "bias", bias, TensorSlice(0, (ShardRange(0, linear.out_features),), linear.out_features))
        elif bias is not None:
            leave_out(self, "bias")

    @property
    def skip(self) -> int:
        return self._taken.start

    def forward(self, x: Tensor) -> Tensor:
        return self._collectives.all_reduce(self.multiply(x[..., self._taken]))


class VocabParallelEmbedding(WeightShard):
    """`span` of the vocabulary's embeddings. int64 [...] -> [..., hidden], whole on every rank.

    An embedding with an `embed_scale` is multiplied by it: by a buffer (Gemma's) as it is rounded to the weight's
    dtype, by a number (XGLM's) before the product is rounded.
    """

    embed_scale: Tensor | float | None

    def __init__(self, embedding: nn.Embedding, span: ShardRange, collectives: Collectives):
        super().__init__()
        self._collectives = collectives
        self.span = span
        hold(self, "weight", embedding.weight, TensorSlice(0, (span,), embedding.num_embeddings))

        self._rows_of: Callable[[Tensor], Tensor] | None = None
        scale = getattr(embedding, "embed_scale", None)
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    def look_up_by(self, rows_of: Callable[[Tensor], Tensor]) -> None:
        """From now on takes rows by `rows_of`, [T] -> [T, hidden]."""
        self._rows_of = rows_of

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._look_up(token_ids)
        scale = self.embed_scale
        return rows if scale is None else rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)

    def _look_up(self, token_ids: Tensor) -> Tensor:
        if self._collectives.world_size == 1:
            return self._rows(token_ids)
        local = token_ids - self.span.start
        foreign = (local < 0) | (local >= self.span.size)
        rows = self._rows(local.masked_fill(foreign, 0))
        return self._collectives.all_reduce(rows.masked_fill_(foreign.unsqueeze(-1), 0))

    def _rows(self, rows: Tensor) -> Tensor:
        if self._rows_of is not None:
            return self._rows_of(rows.flatten()).view(*rows.shape, -1)
        if isinstance(self._quantized, QuantizedRows):
            values = self._quantized.picked(rows.flatten()).dequantized().to(self.weight.dtype)
            return values.view(*rows.shape, -1)
        return functional.embedding(rows, self.weight)


class VocabParallelHead(ColumnParallelLinear):
    """A rank's span of the output layer: local logits only, [..., hidden] -> [..., span]."""

    def __init__(self, head: nn.Linear, rank: int, world_size: int):
        spans = split_dimension(head.out_features, world_size)
        super().__init__(head, spans[rank])
        self.widths = [span.size for span in spans]  # logits of each rank, in rank order


class WideNorm(nn.Module):
    """A rank's share of an RMS norm over the values of all heads. [..., share] -> [..., share].

    A head that several ranks hold counts once: of the rank's `span` the squares of `counted`, a part of it, are
    added. One small all-reduce a call. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """

    weight: nn.Parameter

    def __init__(self, norm: nn.Module, span: ShardRange, counted: ShardRange, collectives: Collectives):
        super().__init__()
        weight: Tensor = norm.weight  # type: ignore[assignment]
        self._epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
        self._width = weight.shape[0]
        self._counted = slice(counted.start - span.start, counted.stop - span.start)
        self._collectives = collectives
        hold(self, "weight", weight, TensorSlice(0, (span,), self._width))

    def forward(self, x: Tensor) -> Tensor:
        values = x.float()
        squares = values[..., self._counted].pow(2).sum(-1, keepdim=True)
        mean = self._collectives.all_reduce(squares) / self._width
        return (values * torch.rsqrt(mean + self._epsilon) * self.weight).to(x.dtype)


class _LocalNorms(nn.Module):
    """The norms of this rank's heads, under the names that the checkpoint gives them."""

    def __init__(self, norms: nn.ModuleList, heads: ShardRange):
        super().__init__()
        for index, norm in enumerate(norms):
            if heads.start <= index < heads.stop:
                self.add_module(str(index), norm)
            else:
                for name, _ in norm.named_parameters():
                    leave_out(self, f"{index}.{name}")

    def __iter__(self):  # type: ignore[no-untyped-def]  # what transformers' code walks through
        return iter(self.children())


def keep_head_norms(norm: nn.Module, name: str, heads: ShardRange, total: int) -> None:
    """Makes `norm` (module `name`), which has weights for each of `total` heads, hold those of `heads` alone.

    Raises `ModelLoadError` when it is built in a way that is not known.
    """
    norms = getattr(norm, "norms", None)
    if isinstance(norms, nn.ModuleList) and len(norms) == total:
        norm.norms = _LocalNorms(norms, heads)
        return
    parameters = list(norm.named_parameters())
    for leaf, parameter in parameters:
        if "." in leaf or parameter.dim() != 2 or parameter.shape[0] != total:
            raise ModelLoadError(
                f"The norm {name} holds {leaf} of shape {list(parameter.shape)}, which is not one row for each of "
                f"{total} heads, and is not served; choose a model of another architecture."
            )
        hold(norm, leaf, parameter, TensorSlice(0, (heads,), total))


class LatentWeight(nn.Module):
    """`kv_b_proj` of this rank's heads: [heads * (n + v), r]. Plain whatever the checkpoint has: it is multiplied from
    both sides."""

    weight: nn.Parameter

    def __init__(self, linear: Any, layout: ShardLayout, rotated: int):
        """`linear`: `kv_b_proj` whole."""
        super().__init__()
        self.heads, self.value_width = layout.q_heads.size, layout.value_dim
        self.rank, self.rotated = linear.in_features, rotated
        self._plain = layout.head_dim - rotated
        rows = self._plain + self.value_width
        if linear.bias is not None or linear.out_features != layout.total.q_heads * rows:
            raise ModelLoadError(
                f"A layer makes {linear.out_features} keys and values of a latent where config.json calls for "
                f"{layout.total.q_heads * rows}, without biases; choose a model of another architecture."
            )
        hold(self, "weight", linear.weight, TensorSlice(0, (layout.q_heads.scaled(rows),), linear.out_features))
        saved = 2 * self.rank - rows
        # Rows of a chunk from which on keys and values are made of the lines.
        self.expands_from: float = self.rank * rows / saved if saved > 0 else 0.0
        # (rows, A [n, r], B [this rank's outputs, n]) of each adapter of the rows that are computed: the weight is
        # more by B A for these rows.
        self.low_rank: Callable[[], list[tuple[Tensor, Tensor, Tensor]]] = list

    @property
    def of_keys(self) -> Tensor:
        """[heads, n, r]"""
        return self.weight.view(self.heads, -1, self.rank)[:, : self._plain]

    @property
    def of_values(self) -> Tensor:
        """[heads, v, r]"""
        return self.weight.view(self.heads, -1, self.rank)[:, self._plain :]

    def absorbed(self, query: Tensor) -> Tensor:
        """`query` [T, heads, n + d] -> [T, 1, heads, r + d], to be multiplied with lines."""
        plain, rotated = torch.split_with_sizes(query, (self._plain, self.rotated), dim=-1)
        within = torch.bmm(plain.transpose(0, 1), self.of_keys).transpose(0, 1)
        for rows, a, b in self.low_rank():
            more = torch.einsum("thn,hnr->thr", plain[rows], self._heads_of(b)[:, : self._plain]) @ a
            within = within.index_add(0, rows, more)
        return torch.cat((within, rotated), dim=-1).unsqueeze(1)

    def outputs(self, latents: Tensor) -> Tensor:
        """Weighted sums of latents [T, 1, heads, r] -> [T, heads, v]."""
        made = torch.bmm(latents[:, 0].transpose(0, 1), self.of_values.mT).transpose(0, 1)
        for rows, a, b in self.low_rank():
            values = self._heads_of(b)[:, self._plain :]
            made = made.index_add(0, rows, torch.einsum("thr,hvr->thv", latents[rows, 0] @ a.T, values))
        return made

    def expanded(self, lines: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """`lines` [K, r + d], of one sequence -> keys [heads, K, n + d] and values [heads, K, v] of these heads."""
        latents, rotated = torch.split_with_sizes(lines, (self.rank, self.rotated), dim=-1)
        plain = torch.matmul(latents, self.of_keys[heads].mT)
        values = torch.matmul(latents, self.of_values[heads].mT)
        for _, a, b in self.low_rank():
            low, more = latents @ a.T, self._heads_of(b)[heads]
            plain = plain + low @ more[:, : self._plain].mT
            values = values + low @ more[:, self._plain :].mT
        keys = torch.cat((plain, rotated.expand(plain.shape[0], -1, -1)), dim=-1)
        return keys, values

    def _heads_of(self, b: Tensor) -> Tensor:
        return b.view(self.heads, -1, b.shape[1])

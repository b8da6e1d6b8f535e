"""Who holds what: how heads, vocabulary and other dimensions are split over the ranks of a ring.

Pure arithmetic. Every split is contiguous, so that a rank reads one slice of each checkpoint tensor.

    kv heads >= ranks     whole KV groups; where they do not divide, two neighbours hold the group between
                          them, provided that no rank then holds more than some rank must anyway
      9 q over 3 kv, 2 ranks      rank 0: q 0-5, kv 0-1      rank 1: q 3-8, kv 1-2     shared: kv 1
                          output      q 0-3                          q 4-8

    kv heads < ranks      one KV head per rank, held by as few ranks as needed, its q heads spread
      8 q over 2 kv, 3 ranks      rank 0: q 0-1, kv 0        rank 1: q 2-3, kv 0     rank 2: q 4-7, kv 1

Either way a rank has the same number of q heads for each of its KV heads. A shared head's attention is
either rank's to compute, row by row (the native kernels halve it), or both ranks' (PyTorch: the other would only wait).
What becomes of it is multiplied on one of them, so that every q head counts once.
"""

from dataclasses import dataclass
from itertools import pairwise

from services.executor.families.registry import family_of
from shared.errors import ConfigurationError, ModelLoadError

_MULTIPLES = (64, 32, 16, 8)  # row counts that matrix kernels like, best first
# How much larger than an equal share the largest must be for ranks to share heads: it costs a meeting per layer.
_WORTH = 1.1


@dataclass(frozen=True)
class ShardRange:
    """The half-open range [start, stop) of a dimension."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def scaled(self, factor: int) -> "ShardRange":
        """The same span counted in units `factor` times smaller: heads to rows."""
        return ShardRange(self.start * factor, self.stop * factor)


@dataclass(frozen=True)
class HeadCounts:
    """The attention shape of a whole model."""

    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0  # of a head's values, where they are not as wide as its keys; else 0

    def __post_init__(self) -> None:
        if self.q_heads < 1 or self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise ModelLoadError(
                f"The model has {self.q_heads} attention heads over {self.kv_heads} KV heads, which do not group "
                "evenly; serve a model whose attention heads are a multiple of its KV heads."
            )

    @classmethod
    def from_config(cls, config: object) -> "HeadCounts":
        """Reads a transformers text configuration; of one whose layers differ, the first layer's. Raises
        `ModelLoadError` where heads are not uniform."""
        if getattr(config, "is_heterogeneous", False):
            config = config.per_layer_config[0]  # type: ignore[attr-defined]
        family = family_of(getattr(config, "model_type", ""))
        if family.state_heads:
            count = _count(config, family.state_heads)
            return cls(count, count, 1)
        q_heads = _count(config, "num_attention_heads")
        if getattr(config, "kv_lora_rank", None):
            return cls._latent(config, q_heads)
        kv_heads = _kv_heads(config, q_heads)
        head_dim = getattr(config, "head_dim", None)
        if head_dim is None:
            hidden = _count(config, "hidden_size")
            if hidden % q_heads:
                raise ModelLoadError(
                    f"The model's hidden size {hidden} is not a multiple of its {q_heads} attention heads; "
                    "its config.json must name head_dim."
                )
            head_dim = hidden // q_heads
        if family.paired_heads:
            return cls(q_heads // 2, kv_heads // 2, 2 * int(head_dim))
        return cls(q_heads, kv_heads, int(head_dim))

    @classmethod
    def _latent(cls, config: object, q_heads: int) -> "HeadCounts":
        """Of latent attention: queries are cut by heads; the one line that a token keeps for all is every rank's."""
        widths = (_count(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
        return cls(q_heads, 1, sum(widths), _count(config, "v_head_dim"))


@dataclass(frozen=True)
class SharedHead:
    """A KV head that two neighbouring ranks hold, as one of them sees it."""

    kv_head: int  # among the rank's own
    slot: int  # among all shared heads of the ring
    is_first: bool  # whether this rank is the first of the two
    first_share: int  # what the first of the two computes of its attention, in parts of `world_size`


@dataclass(frozen=True)
class ShardLayout:
    """What one rank holds of a model. Equal inputs give equal layouts, so ranks agree without talking."""

    rank: int
    world_size: int
    total: HeadCounts
    q_heads: ShardRange  # those of its KV heads
    kv_heads: ShardRange
    output_heads: ShardRange  # of the q heads, those whose outputs it multiplies: each head is some rank's

    @classmethod
    def from_config(cls, config: object, world_size: int, rank: int) -> "ShardLayout":
        """Layout of `rank` out of `world_size` for a transformers configuration.

        Raises `ConfigurationError` when there are more ranks than attention heads, `ModelLoadError`
        when the configuration's heads cannot be split.
        """
        return cls.of(HeadCounts.from_config(config), world_size, rank)

    @classmethod
    def of(cls, total: HeadCounts, world_size: int, rank: int) -> "ShardLayout":
        """Layout of `rank` out of `world_size` for the head counts `total`."""
        if not 0 <= rank < world_size:
            raise ConfigurationError(f"Rank {rank} is outside a ring of {world_size}; ranks count from 0.")
        if world_size > total.q_heads:
            raise ConfigurationError(
                f"The model has {total.q_heads} attention heads and cannot be split over {world_size} ranks; "
                f"use --tp {total.q_heads} or less."
            )
        group = total.q_heads // total.kv_heads
        if total.kv_heads >= world_size:
            kv_heads, output_heads = _spread_heads(total.kv_heads, group, world_size)[rank]
            return cls(rank, world_size, total, kv_heads.scaled(group), kv_heads, output_heads)
        q_heads, kv_heads = _replicated_heads(total.kv_heads, group, world_size, rank)
        return cls(rank, world_size, total, q_heads, kv_heads, q_heads)

    @property
    def head_dim(self) -> int:
        return self.total.head_dim

    @property
    def value_dim(self) -> int:
        return self.total.value_dim or self.total.head_dim

    @property
    def q_per_kv(self) -> int:
        """q heads of this rank for each of its KV heads."""
        return self.q_heads.size // self.kv_heads.size

    @property
    def counted_kv_heads(self) -> ShardRange:
        """Those of its KV heads that no rank before it holds: where each head counts once."""
        if self.rank == 0:
            return self.kv_heads
        before = ShardLayout.of(self.total, self.world_size, self.rank - 1).kv_heads.stop
        return ShardRange(max(self.kv_heads.start, before), self.kv_heads.stop)

    @property
    def shared_heads(self) -> list[SharedHead]:
        """The KV heads that this rank shares with the one before it and the one behind it."""
        found = []
        for slot, (first, kv_head) in enumerate(self._shared()):
            if self.rank in (first, first + 1):
                share = self.total.kv_heads * (first + 1) - kv_head * self.world_size
                found.append(SharedHead(kv_head - self.kv_heads.start, slot, self.rank == first, share))
        return found

    @property
    def num_shared_heads(self) -> int:
        """Of the whole ring."""
        return len(self._shared())

    def _shared(self) -> list[tuple[int, int]]:
        """(the first rank of the two, the KV head)"""
        if self.total.kv_heads < self.world_size:
            return []
        group = self.total.q_heads // self.total.kv_heads
        spans = [kv for kv, _ in _spread_heads(self.total.kv_heads, group, self.world_size)]
        return [(rank, two[1].start) for rank, two in enumerate(pairwise(spans)) if two[0].stop > two[1].start]

    def dimension(self, size: int) -> ShardRange:
        """This rank's span of a plain dimension (MLP width, vocabulary) of `size`.

        Uneven where it does not divide. What is left over goes to the last ranks, because uneven
        heads go to the first, and rank 0 leads as well.
        """
        return split_dimension(size, self.world_size)[self.rank]


def split(total: int, parts: int) -> list[ShardRange]:
    """`total` cut into `parts` contiguous spans that differ by at most one; the first are the larger."""
    base, larger = divmod(total, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < larger))
    return [ShardRange(start, stop) for start, stop in pairwise(bounds)]


def split_dimension(size: int, parts: int) -> list[ShardRange]:
    """`size` cut into `parts` spans in multiples that matrix kernels like; the last are the larger.

    Raises `ConfigurationError` when `size` is smaller than `parts`.
    """
    if size < 1:
        raise ModelLoadError(
            f"The model's config.json gives a layer a width of {size}; it is damaged or of another model, fetch it "
            "again."
        )
    if size < parts:
        raise ConfigurationError(f"A dimension of {size} cannot be split over {parts} ranks; use --tp {size} or less.")
    multiple = next((m for m in _MULTIPLES if size % m == 0 and size // m >= parts), 1)
    sizes = [span.size * multiple for span in reversed(split(size // multiple, parts))]
    bounds = [sum(sizes[:part]) for part in range(parts + 1)]
    return [ShardRange(start, stop) for start, stop in pairwise(bounds)]


def _spread_heads(kv_heads: int, group: int, world_size: int) -> list[tuple[ShardRange, ShardRange]]:
    """(KV heads, q heads of the output) of each rank, where there are at least as many KV heads as ranks."""
    most = -(-kv_heads // world_size)
    # Rank r has the heads [r, r + 1) * heads / ranks, and whole those that this cuts.
    held = [
        ShardRange(rank * kv_heads // world_size, -(-(rank + 1) * kv_heads // world_size)) for rank in range(world_size)
    ]
    if most * world_size < _WORTH * kv_heads or max(span.size for span in held) > most:
        return [(span, span.scaled(group)) for span in split(kv_heads, world_size)]
    bounds = [rank * kv_heads * group // world_size for rank in range(world_size + 1)]
    return [(span, ShardRange(*ends)) for span, ends in zip(held, pairwise(bounds), strict=True)]


def _replicated_heads(kv_heads: int, group: int, world_size: int, rank: int) -> tuple[ShardRange, ShardRange]:
    """(q span, kv span) of `rank` when several ranks share one KV head of `group` q heads."""
    for head, ranks in enumerate(split(world_size, kv_heads)):
        if ranks.start <= rank < ranks.stop:
            share = split(group, ranks.size)[rank - ranks.start]
            first = head * group
            return ShardRange(first + share.start, first + share.stop), ShardRange(head, head + 1)
    raise AssertionError("every rank holds a KV head")


def _kv_heads(config: object, q_heads: int) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    name = "num_kv_heads" if getattr(config, "num_key_value_heads", None) is None else "num_key_value_heads"
    return _count(config, name, default=q_heads)


def _count(config: object, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(
            f"The model's config.json has {name} = {value!r} where one positive number is needed; "
            "models with other shapes per layer are not served."
        )
    return value

"""Which earlier blocks a token reads where its request asks for sparse attention: a function of its position alone.

    position p    [ sinks | between: the `top` best of these | recent | own block ]
    blocks          0 ..    first .. recent - 1                          own

Arithmetic over whole numbers, the same here and in the native kernels: what a token reads must
not depend on who computes it. A request's choice travels in `StepPlan.sparse` as `FIELDS` numbers a sequence.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from services.executor.core.step_plan import to_bytes
from shared.errors import InvalidRequest
from shared.messages import SparseAttention
from shared.sparse_attention import WrongChoice, check

# Numbers of a choice in a plan: kind, threshold, sinks, recent, budget, share in millionths, dense layers.
FIELDS = 7
DENSE, PAGES, WINDOW = 0, 1, 2  # kinds, as plans and kernels number them
MILLION = 1_000_000
KINDS = {"pages": PAGES, "window": WINDOW}
# How many times its keys' deviation a page's score is above that of their mean; native kernels have the same.
DEVIATIONS = 1.0

NO_CHOICE = (DENSE, 0, 0, 0, 0, 0, 0)  # of a sequence whose tokens read everything


class BlockReads(NamedTuple):
    """What a token reads of the blocks before its own."""

    first: int  # blocks of sinks: [0, first) are read
    recent: int  # and [recent, own)
    top: int  # how many of [first, recent) are read besides; fewer than there are


class SparsePattern(NamedTuple):
    """A request's choice, as plans have it; in tokens."""

    kind: int
    threshold: int
    sinks: int
    recent: int
    budget: int
    share: int
    dense_layers: int

    @classmethod
    def of(cls, wanted: SparseAttention | None) -> "SparsePattern":
        if wanted is None:
            return cls(*NO_CHOICE)
        share = round(wanted.share * MILLION)
        sizes = (wanted.threshold, wanted.sinks, wanted.recent, wanted.budget, share, wanted.dense_layers)
        return cls(KINDS[wanted.kind], *sizes)

    def reading(self, position: int, block_size: int) -> BlockReads | None:
        """What the token at `position` reads; None: all that is before it."""
        if self.kind == DENSE or position < self.threshold:
            return None
        own = position // block_size
        first = min(-(-self.sinks // block_size), own)
        recent = max(first, min(own, max(0, position - self.recent + 1) // block_size))
        wanted = 0 if self.kind == WINDOW else max(self.budget, position * self.share // MILLION)
        top = min(recent - first, -(-wanted // block_size))
        return None if top == recent - first else BlockReads(first, recent, top)

    def salt(self) -> bytes:
        """What distinguishes keys and values that were computed with this choice."""
        return blake2b(to_bytes(list(self)), digest_size=16).digest()


def problem_with(wanted: SparseAttention, block_size: int, kinds: Sequence[str]) -> InvalidRequest | None:
    """Why a ring that computes these `kinds`, in blocks of `block_size` tokens, cannot compute `wanted`."""
    if not kinds:
        return InvalidRequest("This group computes no sparse attention; leave out sparse_attention.")
    if wanted.kind not in kinds:
        return InvalidRequest(
            f"This group keeps no page summaries, so sparse_attention of kind {wanted.kind!r} cannot be computed; "
            "start it with --sparse-attention, ask for kind 'window', or leave sparse_attention out."
        )
    try:
        check(wanted, block_size)
    except WrongChoice as error:
        return InvalidRequest(f"Invalid sparse_attention.{error.field}: {error}.")
    return None

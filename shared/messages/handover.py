"""What the leaders of two rings say to each other when one of them leaves: `groups.<group>.handover`.

The ring that leaves asks, the peer answers. The blocks themselves go from rank to rank and not over the broker.
Maps on the wire, as all messages; fields are only ever added, at the end and with a default.
"""

import msgspec


class OfferedSession(msgspec.Struct, frozen=True, array_like=True):
    """A conversation that blocks are kept for."""

    name: str
    idle: float
    """Seconds since its last turn."""


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A full KV block. Its digest follows from the two: nobody has to believe one."""

    parent: bytes
    """Digest of the block before it, or the root of the model's chains."""
    tokens: bytes
    """int32, little-endian."""
    session: int
    """Index of the session that it is kept for."""


class BlockOffer(msgspec.Struct, frozen=True, tag="offer"):
    """A batch of blocks, each after those that it continues. An earlier batch is over."""

    group: str
    epoch: int
    """Who offers."""
    format: str
    """What the blocks' bytes mean, and of which model with which weights they are."""
    sessions: list[OfferedSession]
    blocks: list[OfferedBlock]


class BlocksSent(msgspec.Struct, frozen=True, tag="sent"):
    """All ranks have sent what was wanted of the batch, or will not."""

    group: str
    epoch: int


class HandoverEnd(msgspec.Struct, frozen=True, tag="end"):
    """There is nothing more to come."""

    group: str
    epoch: int


HandoverMessage = BlockOffer | BlocksSent | HandoverEnd


class HandoverReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """To each of them."""

    ok: bool
    reason: str = ""
    """Why not."""
    wanted: list[int] = []
    """Indices of the offered blocks that the peer has reserved room for, ascending."""
    key: bytes = b""
    """What the ranks show each other; for this batch alone."""
    addresses: list[tuple[str, int]] = []
    """`(host, port)` of each rank."""
    held: bytes = b""
    """To `BlocksSent`: for each offered block 1 where the peer has it, else 0."""
    epoch: int = 0
    """Of the peer's ring."""

"""What the leader of a group is told and answers: dispatch, control, hand-over of KV blocks between groups.

scheduler, gateway ── DispatchBatch, ControlCommand ──▶ groups.<group>.dispatch, .control
leader that leaves ── HandoverMessage ──▶ groups.<peer>.handover; the blocks go from rank to rank
"""

import msgspec

from shared.messages.generations import GenerationRequest


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a ring did not take a request. `code` is one of `shared.errors`."""

    generation_id: str
    code: str
    message: str
    retryable: bool = True


class GroupLoad(msgspec.Struct, frozen=True):
    """How full a group is."""

    running: int = 0  # sequences in the current batch
    waiting: int = 0  # accepted sequences that are not in the batch yet
    waiting_tokens: int = 0  # prompt tokens not computed yet
    free_blocks: int = 0  # KV blocks that can be had at once (free, or cached but unused)
    total_blocks: int = 0
    version: int = 0  # grows with each report of the ring's leader: of two reports the larger is the newer
    slots: int = 0  # sequences that the batch has room for; 0: not known
    step_seconds: float = 0.0  # what a step takes that computes no prompt, lately; 0: not measured yet
    prompt_tokens_per_second: float = 0.0  # how fast prompts are computed, lately; 0: not measured yet


class DispatchBatch(msgspec.Struct, frozen=True):
    """1-128 requests for one group."""

    requests: list[GenerationRequest]
    # The newest life of the group's ring that the scheduler knows of; an older ring that still listens
    # under the group's name has been replaced, and takes nothing more.
    epoch: int = 0


class DispatchReply(msgspec.Struct, frozen=True):
    """Every request of the batch is named once, in `accepted` or in `refused`."""

    group: str
    epoch: int
    accepted: list[str]
    refused: list[Refusal]
    load: GroupLoad


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop these generations; unknown ids are no error."""

    generation_ids: list[str]
    # -1: the client has gone, whatever the attempt. Else only attempts up to this one are withdrawn: they
    # end with a retryable error, and a late command does not hit their successor.
    attempt: int = -1
    # The claim under which its sender decides for these generations: where a newer one is known, the sender
    # owns them no more and is ignored. -1: whoever owns them, as when a client asks for it.
    claim: int = -1


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """Another gateway owns these generations from now on: what an earlier owner still decides about them is void.

    A claim is the revision of the generation's entry in the bucket `generations`; 0: it was never claimed."""

    generation_ids: list[str]
    claim: int


class Drain(msgspec.Struct, frozen=True, omit_defaults=True, tag="drain"):
    """Accept nothing more, finish what runs, hand back what has not finished in time, then leave."""

    grace: float = -1.0  # seconds that what runs may take to finish; below 0: as the executor's settings say


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """Stay after all, and accept requests again. Too late for a group that has left."""


ControlCommand = Cancel | Drain | Undrain | Claimed


class ControlReply(msgspec.Struct, frozen=True, omit_defaults=True):
    ok: bool
    error: str = ""


class CancelRequest(msgspec.Struct, frozen=True):
    """Broadcast to schedulers, for generations whose group the gateway does not know yet."""

    generation_ids: list[str]
    claim: int = -1  # as a `Cancel`'s


# --- hand-over of KV blocks (leader → leader) -------------------------------------------------------


class OfferedSession(msgspec.Struct, frozen=True, array_like=True):
    """A conversation that blocks are kept for."""

    name: str
    idle: float  # seconds since its last turn


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A full KV block. Its digest follows from the two: nobody has to believe one."""

    parent: bytes  # digest of the block before it, or the root of the model's chains
    tokens: bytes  # int32, little-endian
    session: int  # index of the session that it is kept for


class BlockOffer(msgspec.Struct, frozen=True, tag="offer"):
    """A batch of blocks, each after those that it continues. An earlier batch is over."""

    group: str
    epoch: int  # who offers
    format: str  # what the blocks' bytes mean, and of which model with which weights they are
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
    reason: str = ""  # why not
    wanted: list[int] = []  # indices of the offered blocks that the peer has reserved room for, ascending
    key: bytes = b""  # what the ranks show each other; for this batch alone
    addresses: list[tuple[str, int]] = []  # `(host, port)` of each rank
    held: bytes = b""  # to `BlocksSent`: for each offered block 1 where the peer has it, else 0
    epoch: int = 0  # of the peer's ring

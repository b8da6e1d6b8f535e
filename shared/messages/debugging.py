"""What is said when somebody looks into a ring: commands to its supervisor, and what a dump holds.

    groups.<group>.debug    command ──▶ JobReply, at once: the work is done meanwhile
                            ResultCommand, until it is done ──▶ the files there are
                            FetchCommand, piece after piece ──▶ Piece

The supervisor answers, not the leader: it does so for a ring that is hung, loading or gone. What it gives out is
fetched in pieces that any broker takes, by whoever asked, and thrown away after a while.
"""

from typing import Literal

import msgspec

PIECE_BYTES = 256 << 10  # of a file, at most, in one answer

# --- commands ------------------------------------------------------------------------------------


class DumpCommand(msgspec.Struct, frozen=True, tag="dump"):
    """Write down how the ring is."""

    wait: float = 1.0  # seconds for which ranks that do not answer are waited for


class ProfileCommand(msgspec.Struct, frozen=True, tag="profile"):
    """Profile the next steps."""

    steps: int = 20  # 0: for `seconds`
    seconds: float = 0.0
    ranks: list[int] = []  # empty: all
    memory: bool = False
    timeout: float = 60.0  # seconds within which it must be over


class ResultCommand(msgspec.Struct, frozen=True, tag="result"):
    """What has become of a job?"""

    job: str


class FetchCommand(msgspec.Struct, frozen=True, tag="fetch"):
    """The bytes of a job's file from `offset` on, as many as go into a piece."""

    job: str
    name: str
    offset: int = 0


DebugCommand = DumpCommand | ProfileCommand | ResultCommand | FetchCommand


class JobFile(msgspec.Struct, frozen=True):
    name: str
    size: int


class JobReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a job is."""

    job: str = ""
    done: bool = False
    error: str = ""  # why there is nothing; empty: all is well
    files: list[JobFile] = []


class Piece(msgspec.Struct, frozen=True):
    data: bytes  # empty: there is nothing at that offset, or the job is not known any more


# --- a dump --------------------------------------------------------------------------------------

DUMP_VERSION = 1


class ThreadDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thread, as the kernel sees it."""

    tid: int
    name: str
    state: str  # as in /proc: R runs, S sleeps, D cannot be interrupted, T is stopped
    cpu_seconds: float
    busy: float = 0.0  # share of a core that it used while the dump was taken
    wchan: str = ""  # where in the kernel it waits
    syscall: str = ""
    kernel_stack: list[str] = []  # where it may be read (root)


class StackDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thread's Python frames, the innermost first."""

    thread: str  # its name where the process could tell, else its number
    frames: list[str]  # `file:line function`


class CollectiveDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a rank is in the order of collectives, which is the same for all."""

    name: str
    number: int  # of the last one that it has entered
    in_flight: bool
    bytes: int
    seconds: float  # since it entered that one
    total_seconds: float = 0.0  # in all of them, since the rank started
    waited_seconds: float = 0.0  # of that, waiting for other ranks; 0 where the collectives do not tell


class StepDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long one rank has taken for one of the last steps; milliseconds."""

    step: int
    ms: float  # so far, for one that is under way
    done: bool = True
    send_ms: float = 0.0  # leader: sending the plan
    compute_ms: float = 0.0  # leader: until the logits were there
    sample_ms: float = 0.0
    collective_ms: float = 0.0
    waited_ms: float = 0.0


class RankDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank."""

    rank: int
    pid: int
    process: str  # running, sleeping, stopped, stuck in the kernel, ended
    begun_step: int = 0  # the last step that this rank has begun
    finished_step: int = 0
    in_flight: bool = False  # whether the leader has begun a step that this rank has not finished
    layers: int = 0  # its progress counter
    still_seconds: float = 0.0  # for so long neither step nor counter has moved
    memory_bytes: int = 0
    collective: CollectiveDump | None = None
    steps: list[StepDump] = []
    stacks: list[StackDump] = []
    stacks_missing: str = ""  # why there are none
    answered: bool = False  # whether Python code in it could still run
    threads: list[ThreadDump] = []
    log: list[str] = []  # the last lines that it has written


class QueuedDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request that the ring has."""

    generation_id: str
    request_id: str
    state: Literal["held", "waiting", "running", "ended"]
    lane: str
    attempt: int
    age: float  # seconds since it came to this ring
    prompt_tokens: int
    output_tokens: int
    computed: int
    blocks: int
    session: bool = False
    in_step: bool = False
    restoring: int = 0  # blocks that are still to be brought back from host memory or disk
    slot: int = -1  # of its recurrent state; -1: it has none
    snapshots: list[int] = []  # numbers of its full blocks behind which that state is kept


class PoolDump(msgspec.Struct, frozen=True):
    """KV blocks of one format."""

    total: int
    empty: int
    cached: int
    pinned: int
    used: int


class HolderDump(msgspec.Struct, frozen=True):
    """Who has many KV blocks: a running sequence, or a session that they are pinned for."""

    kind: Literal["sequence", "session"]
    name: str
    blocks: int


class AllocatorDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """The KV blocks of the ring; the same on every rank."""

    block_size: int
    writable: PoolDump
    quantized: PoolDump
    private: int  # used blocks that are being filled
    shared: int  # used blocks that several sequences have
    promised: int  # blocks that running sequences will still need
    # Blocks that an admission leaves to those that run: below this nobody is admitted beside others.
    reserve: int
    host_slots: int
    host_used: int
    disk_slots: int
    disk_used: int
    sessions: int  # sessions that have blocks pinned
    holders: list[HolderDump]  # the largest
    invariants: str  # `hold`, or what is broken
    # For recurrent state, of sequences and of snapshots that are being made; 0: the model keeps none.
    state_slots: int = 0
    state_slots_used: int = 0
    snapshots: int = 0  # of recurrent state, in quantized blocks
    snapshot_blocks: int = 0  # blocks that one takes
    layers: str = ""  # what the model's layers keep on rank 0


class LeaderDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """What only the leader's own memory has."""

    queues: list[QueuedDump]
    counts: dict[str, int]
    allocator: AllocatorDump | None = None  # of engines that schedule for themselves nothing is known
    by_loop: bool = True  # whether its event loop told; else another thread read what it found


class PlanSequenceDump(msgspec.Struct, frozen=True, omit_defaults=True):
    generation_id: str
    tokens: int
    context: int
    blocks: list[int]


class PlanDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step plan, without its tokens."""

    step: int
    age: float  # seconds before the dump at which it was made
    ms: float  # what the step has taken; 0: it is not over
    tokens: int
    decodes: int
    sampled: int
    saves: int = 0
    compressions: int = 0
    restores: int = 0
    pools: int = 0
    snapshots: int = 0  # of recurrent state: taken behind a row of the step,
    snapshot_saves: int = 0  # put into blocks before it,
    snapshot_loads: int = 0  # and loaded, which sequences begin with
    sequence_count: int = 0
    blocks: int = 0
    sequences: list[PlanSequenceDump] = []  # as many as there was room for


class Dump(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group, looked into."""

    version: int
    group: str
    model: str
    instance: str
    host: str
    epoch: int
    taken_at: float  # Unix seconds
    took: float  # seconds that it took
    verdict: str  # in one sentence: what is the matter, and with which rank
    state: str  # none, starting, ready, draining
    reason: str = ""  # why it was taken; empty: somebody asked
    loaded: float = 0.0
    message: str = ""
    loop_still_seconds: float = 0.0  # for so long the leader's event loop has not turned
    load: dict[str, float] = {}
    totals: dict[str, float] = {}
    ranks: list[RankDump] = []
    leader: LeaderDump | None = None  # None: it could not tell
    plans: list[PlanDump] = []
    versions: dict[str, str] = {}
    settings: dict[str, object] = {}


# --- a profile -----------------------------------------------------------------------------------


class OperatorTime(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of a profile's table; microseconds."""

    name: str
    calls: int
    self_us: float
    total_us: float
    device_us: float = 0.0  # on a GPU, by itself
    memory_bytes: int = 0


class ProfileSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one rank has to say of the steps that were profiled."""

    rank: int
    steps: int = 0
    seconds: float = 0.0  # from the first step's beginning to the last one's end
    trace: str = ""  # name of its file
    operators: list[OperatorTime] = []
    # Seconds in each part of the native kernels, which the trace shows as one range.
    native: dict[str, float] = {}
    error: str = ""

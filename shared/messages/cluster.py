"""What is known of services and groups: heartbeats, events, log levels, and what lies in KV buckets."""

from typing import Any, Literal

import msgspec

from shared.messages.generations import SparseKind
from shared.messages.groups import GroupLoad
from shared.messages.registry import HostBeat

ServiceName = Literal["gateway", "scheduler", "health-monitor", "executor"]
GroupStatus = Literal["starting", "ready", "busy", "hung", "draining", "gone"]
ServiceStatus = Literal["starting", "ready", "draining", "gone"]


class RankBeat(msgspec.Struct, frozen=True):
    """Progress of one rank."""

    rank: int
    pid: int
    step: int  # steps finished since the ring started
    progress: int  # grows within a step too (once per layer): standing still with work in flight means hung
    in_flight: bool  # whether the rank has begun a step that it has not finished


class GroupWork(msgspec.Struct, frozen=True):
    """What a ring has done since it started."""

    steps: int = 0
    seconds: float = 0.0  # time that these steps took
    tokens: int = 0  # prompt tokens computed and output tokens generated


# What rings die of. All but the first may be of the making of a request.
RING_CAUSES = ("external", "out_of_memory", "crashed", "hung")


class RingDeath(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a ring has died."""

    epoch: int
    cause: str = "external"  # `external`, or what a request may have made: `out_of_memory`, `crashed`, `hung`
    suspects: list[str] = []  # generations in the steps that were under way; none for an external cause
    more: bool = False  # whether not all of them are named: then every generation in the ring is suspected

    def suspects_only(self, generation_id: str) -> bool:
        """Whether that one was computed alone."""
        return self.suspects == [generation_id] and not self.more

    def may_be_of(self, generation_id: str) -> bool:
        """Whether computing that one may be what the ring has died of."""
        return self.cause != "external" and (self.more or generation_id in self.suspects)


class StreamedWeights(msgspec.Struct, frozen=True):
    """Weights of which those that `weights_memory` has no room for are read from disk in each step, on all ranks."""

    memory: int  # bytes of weights in memory at most
    per_step: int  # bytes that are read for a step of one token
    # Bytes a second that the disks gave at start, beyond the page cache; 0: it could not be measured.
    disk_rate: float

    @property
    def tokens_per_second(self) -> float:
        """Most tokens that the disks allow one sequence without drafts; 0: not known."""
        return self.disk_rate / self.per_step if self.per_step else 0.0

    def of_ranks(self, count: int) -> "StreamedWeights":
        """Of `count` ranks like this one, which have measured their disks at the same time."""
        return StreamedWeights(self.memory * count, self.per_step * count, self.disk_rate * count)


class EngineTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What computes for a group, and what of a request it cannot do."""

    # `ring`, or the engine that schedules for itself: `vllm`, `sglang`, `llama.cpp`. Empty: not told.
    kind: str = ""
    name: str = ""  # for people, with its version, such as `vLLM 0.32.0`; empty: a ring of the executor's own
    unsupported: list[str] = []  # names of `shared.engine_features.FEATURES`


class GroupTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """In what a group may differ from others of its model."""

    sparse: list[SparseKind] = []  # kinds of sparse attention that it computes
    draft_model: str = ""  # as a model card's
    draft_left_out: str = ""  # as a model card's
    engine: EngineTraits = EngineTraits()


class GroupBeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an executor says of its group."""

    group: str
    model: str
    epoch: int
    state: Literal["starting", "ready", "draining"]
    ranks: list[RankBeat]
    load: GroupLoad
    loaded: float = 0.0  # share of the weights that has been read, 0 to 1
    message: str = ""  # why the group is not ready, where there is something to say
    work: GroupWork = GroupWork()
    kv_bytes: int = 0  # most memory that the KV caches of all ranks take once they have been filled
    # Of the group's last ring; of this one where it stands still: so it would have died, were it given up now.
    death: RingDeath | None = None
    kernels: str = ""  # what its ranks compute with, such as `native avx2`; empty: not known yet
    memory: int = 0  # bytes that its weights take, and its KV caches at most, on all ranks; 0: not known yet
    adapters: list[str] = []  # digests of the LoRA adapters that its ranks hold in memory
    streamed: StreamedWeights | None = None  # None: all of its weights are in memory
    traits: GroupTraits | None = None  # None: not known yet, or to an earlier version of the executor
    connected: bool = True  # whether its leader's own connection to NATS stands, as far as the leader knows


class SetLogLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """To one instance of a service: what it shall log from now on. Its ranks do as it does."""

    # debug, info, warning or error; empty: as it stands, this only asks; `usual`: as its settings say.
    level: str = ""
    seconds: float = 0.0  # for how long; 0: until it is changed again


class LogLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `SetLogLevel`."""

    level: str
    usual: str  # as the settings say
    until: float = 0.0  # Unix seconds at which it is `usual` again; 0: it stays
    error: str = ""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Published every second by every service instance."""

    service: ServiceName
    instance: str
    pid: int
    state: ServiceStatus
    address: str = ""  # `host:port` of /health, /ready and /metrics (the gateway's: of its API)
    group: GroupBeat | None = None
    grpc_address: str = ""  # `host:port` of the gateway's gRPC API, where it serves one
    # Where `pid`, and those of the ranks, mean this process (`shared.process.pid_namespace`).
    pid_namespace: str = ""
    sent_at: float = 0.0  # Unix seconds by the sender's clock; 0: not told
    models: list[str] = []  # names of the models that a gateway lists
    # All of an executor's; `group` is the first of them, for versions before this field.
    groups: list[GroupBeat] = []
    host: HostBeat | None = None  # of an executor
    version: str = ""  # of Ryzanstein, such as 0.1.0


class ServiceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A service instance in the KV bucket `services`, written by the health monitor alone."""

    name: ServiceName
    instance: str
    pid: int
    state: ServiceStatus
    address: str = ""
    updated_at: float = 0.0
    heard_at: float = 0.0  # as a group's
    pid_namespace: str = ""  # as a heartbeat's
    version: str = ""  # as a heartbeat's


class GroupRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group in the KV bucket `groups`, written by the health monitor alone."""

    group: str
    model: str
    state: GroupStatus
    epoch: int
    ranks: list[RankBeat]
    load: GroupLoad
    instance: str = ""
    loaded: float = 0.0
    message: str = ""
    updated_at: float = 0.0  # Unix seconds at which this was true, by the monitor's clock
    # How fast the group is, against its own past and its peers, 0.05 to 1; below 1 it is degraded.
    weight: float = 1.0
    # Unix seconds of the heartbeat that this is known from: of two monitors the one with the later is right.
    heard_at: float = 0.0
    kv_bytes: int = 0
    kernels: str = ""  # as a heartbeat's
    memory: int = 0  # as a heartbeat's
    adapters: list[str] = []  # as a heartbeat's
    streamed: StreamedWeights | None = None  # as a heartbeat's
    traits: GroupTraits | None = None  # as a heartbeat's


class GroupEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group has come up, is draining, or is lost (`hung`, `gone`, or a new epoch took its place)."""

    group: str
    model: str
    epoch: int  # the ring's life that the event is about: for a loss, the one that ended
    kind: Literal["up", "draining", "down"]
    reason: str = ""
    # Unix seconds by the monitor's clock, as a record's `updated_at`: tells which of the two is newer.
    at: float = 0.0
    # Of a loss whose cause the executor has told; None: it was seen from outside alone.
    death: RingDeath | None = None


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a group serves, in the KV bucket `models`; written by group leaders."""

    model: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    tokenizer: str  # name of the tokenizer bundle in the object store `tokenizers`; empty: the stub's tokens
    created: int  # Unix seconds
    defaults: dict[str, Any] = {}  # sampling defaults from the model's generation_config.json
    # How the model writes tool calls, as its executor's settings say; `auto`: as its chat template shows.
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"  # the same for its reasoning
    # Of the model and all of the engine's settings that a seed's text depends on; empty: not known.
    fingerprint: str = ""
    embedding_size: int = 0  # numbers in the vector of a request to embed; 0: the model gives none
    # Whether a text depends on nothing but what `fingerprint` is of and the request: not on what else is computed,
    # on what was found in a cache, or on a ring's death in its middle.
    exact: bool = False
    # What it does: `generate`, `embed`, `classify`. Empty: the card is an older executor's, whose model generates, and
    # embeds where it has an `embedding_size`; ask `does`.
    tasks: list[str] = []
    # What of a text its vector or its classes are of: `mean` (of all tokens), `last`, `cls` (the first); empty: the
    # model gives neither, or pools in the way of its own classification head.
    pooling: str = ""
    normalized: bool = True  # whether vectors have the length 1
    bidirectional: bool = False  # whether each token is seen by those before it as well: an encoder
    labels: list[str] = []  # of a classifier, in the order of its logits. A reranker has one
    activation: str = ""  # what makes scores of a classifier's logits: `sigmoid`, `softmax`, `identity`
    # Lengths that vectors may be cut to; None: any; empty: none.
    matryoshka_dimensions: list[int] | None = None
    # Texts that inputs are put behind, by name (sentence-transformers'): `query`, `document`.
    prompts: dict[str, str] = {}
    default_prompt: str = ""  # which of them an input that names none is put behind; empty: none
    architecture: str = ""  # the `model_type` of its config.json; empty: not known
    # How its files hold them. Safetensors: BF16, F16, F32, or the method of their quantization; GGUF files: `GGUF`,
    # and behind a space how they are quantized, where their names say so. Empty: not known.
    weights: str = ""
    sparse: list[SparseKind] = []  # kinds of sparse attention that its groups compute
    page_tokens: int = 0  # tokens of a KV block, of which sparse attention chooses whole ones; 0: not known
    draft_model: str = ""  # the name of the draft model that is to propose its tokens; empty: none is
    draft_left_out: str = ""  # why it is served without that draft model: one sentence; empty: it is not
    # By the last part of linears' names (`q_proj`) their inputs and outputs, of all layers together: an adapter of
    # rank r has r times as many numbers. Empty: not known.
    adapter_widths: dict[str, int] = {}
    # Of the group that has written the card. A gateway refuses what no group of the model can, as far as it has heard.
    engine: EngineTraits = EngineTraits()

    def does(self, task: str) -> bool:
        """Whether the model does `task`."""
        if self.tasks:
            return task in self.tasks
        return task == "generate" or (task == "embed" and self.embedding_size > 0)


class TokenizerBundle(msgspec.Struct, frozen=True):
    """The files a gateway needs to speak a model's text, by name (`tokenizer.json`, ...)."""

    files: dict[str, bytes]


class SessionPin(msgspec.Struct, frozen=True):
    """Where a session's KV cache lives, in the KV bucket `sessions`; written by schedulers."""

    group: str
    epoch: int
    moved_at: float = 0.0  # Unix seconds at which the session left a ring that was too busy; 0: it has not

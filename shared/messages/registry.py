"""The registry: models and adapters that a cluster is to serve, what its hosts are told, and what they say.

    operator, gateways ──▶ KV `registry`, `adapters`          what is wanted
    schedulers (one of them holds the lease) ── LoadModel, UnloadModel ──▶ hosts.<instance>.control
    executors ── HostBeat ──▶ health monitor ──▶ KV `hosts`   what is

A host is an executor with its devices and its memory; it has any number of groups, each of which serves one model.
"""

from typing import Literal

import msgspec

from shared.data_types import DType, KvDType
from shared.messages.generations import SparseAttention
from shared.messages.jobs import HostJobs

MAX_MODELS = 1024  # models in the registry
MAX_ADAPTERS = 16_384  # adapters in the registry, of all models
MAX_ALIASES = 32  # of one model
DIGEST_DIGITS = 64  # of an adapter's digest, in hexadecimal


def is_digest(text: str) -> bool:
    """Whether it names an adapter's content."""
    return len(text) == DIGEST_DIGITS and set(text) <= set("0123456789abcdef")


class ModelSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a model is run; what is None is as the settings of its host say. Named and meant as those of an executor."""

    tp: int | None = None
    dtype: DType | None = None
    weight_dtype: str | None = None
    kv_dtype: KvDType | None = None
    kv_dtype_layers: str | None = None
    kv_memory: int | None = None  # bytes for the KV cache of each rank
    context_length: int | None = None
    max_sequences: int | None = None
    max_batch_tokens: int | None = None
    max_waiting: int | None = None
    speculation: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    max_adapters: int | None = None  # LoRA adapters in memory at a time
    max_adapter_rank: int | None = None
    # Bytes of weights that each rank keeps in memory; the others are read from disk in each step.
    weights_memory: int | None = None
    # A smaller model that proposes tokens, or an EAGLE-3 head; named as a `source`, or `mtp`:
    # the model's own heads. None: there is none, whatever the host's own model has.
    draft_model: str | None = None


class ModelSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model in the KV bucket `registry`: the one truth of what is to be served. Written by gateways and operators."""

    name: str
    # Directory or GGUF file on the hosts, built-in name, or hub name with or without a quantization.
    source: str
    revision: str = ""  # of a hub name: branch, tag or commit; empty: the main branch
    settings: ModelSettings = ModelSettings()
    least: int = 0  # minimum of replicas, kept at all times
    most: int = 1  # maximum of replicas, whatever the load
    pinned: bool = False  # never unloaded to make room for others
    # Seconds without a request after which replicas beyond `least` are unloaded; 0: when others need the memory.
    idle: float = 0.0
    aliases: list[str] = []
    # What somebody has asked for last: a model that is unloaded stays so until it is loaded, or a request comes.
    action: Literal["", "load", "unload"] = ""
    action_at: float = 0.0  # Unix seconds
    force: bool = False  # of an unload: running generations are not waited for; they end with an error
    created: int = 0  # Unix seconds
    # Who has declared it: somebody by hand, the `ryzanstein up` of this NATS, or a models file. Each takes back what
    # it no longer declares, and nothing else.
    origin: Literal["", "up", "file"] = ""
    # Sampling defaults, named as in a model's generation_config.json, by the name that a client gives: an alias, the
    # model's own, or that of an adapter of it.
    defaults: dict[str, dict[str, float]] = {}
    # Whether it is pinned by a request's `keep_alive`, which a later one takes back; a pin by hand or of a file
    # stays.
    pinned_by_request: bool = False
    # How its requests attend that do not say it themselves, and whether its groups keep what that takes; None: to
    # everything, on groups that are as their host's settings say.
    sparse_attention: bool | SparseAttention | None = None

    def declared(self) -> "ModelSpec":
        """Without what those who write the registry keep for themselves."""
        return msgspec.structs.replace(self, action="", action_at=0.0, force=False, created=0, origin="", defaults={})


class WantedAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an adapter's name is to stand for, once a host that has its base has read it."""

    model: str
    source: str
    revision: str = ""
    since: float = 0.0  # Unix seconds
    error: str = ""  # why a host could not read it, the last time that one tried: one sentence


class AdapterRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A LoRA adapter in the KV bucket `adapters`; its files lie in the object store `adapters` under the digest."""

    name: str
    model: str  # name of its base in the registry
    source: str  # directory on the host that has read it, or hub name
    # Of its configuration and weights: hexadecimal. A name may get another one; what runs goes on with its own.
    digest: str
    rank: int
    bytes: int
    created: int = 0  # Unix seconds
    # (digest, unix seconds) of what the name stood for until then: such files stay in the object store as long as a
    # generation may need them. A record without a `digest` has nothing else: its adapter was unloaded, or is wanted and
    # was never read.
    retired: list[tuple[str, int]] = []
    revision: str = ""  # of a hub name: branch, tag or commit; empty: the main branch
    # The model that it was trained for, as its own configuration names it (`base_model_name_or_path`).
    base: str = ""
    origin: Literal["", "up", "file"] = ""  # who has declared it, as of a model
    # What the name is to stand for next: the scheduler that decides has a host read it.
    wanted: WantedAdapter | None = None
    # Whose it is, alone: of a fine-tuning job. None: everybody's. An empty one is the tenant of requests without a
    # key.
    tenant: str | None = None
    job: str = ""  # the fine-tuning job that has made it


class AdapterHolders(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who needs the files of an adapter, in the KV bucket `adapter_files` by their digest. Files that nobody holds are
    deleted, and then this."""

    # Since when, in unix seconds: `name/<name>` of a name that stands for them or did until lately, `job/<id>/<step>`
    # of a fine-tuning job that has made them.
    holders: dict[str, float] = {}
    whole: bool = False  # whether all files have been stored since somebody holds them


HostModelState = Literal["downloading", "loading", "sleeping", "failed", "stored"]


class HostModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a host says of a model that it works on, has on disk, or could not load."""

    model: str
    # `loading`: a group is on its way; `sleeping`: its weights are held in host memory; `stored`: on disk alone.
    state: HostModelState
    done: int = 0
    total: int = 0  # bytes of a download, or of what is loaded; 0: not known
    error: str = ""  # why it has failed: one sentence
    memory: int = 0  # bytes that a group of it takes, weights and KV cache; 0: not known yet
    load_seconds: float = 0.0  # what its last load has taken here; 0: there was none
    failed_at: float = 0.0  # Unix seconds


class HostTraining(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a host says of a job that it trains, in its heartbeats."""

    job: str
    tenant: str
    attempt: int
    # `yielding`: interactive requests have the host's processors.
    state: Literal["loading", "training", "yielding", "ending"]
    step: int = 0
    memory: int = 0  # bytes that it was promised
    replica: int = 0  # which part of the job it has, of one that several hosts train


class HostBeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an executor says of itself as a host."""

    memory: int = 0  # bytes that its groups may take together, on all its devices
    used: int = 0  # bytes that they take, or have been promised
    devices: int = 0  # GPUs; 0: it computes on its CPU
    models: list[HostModel] = []
    takes_models: bool = False  # whether it loads and unloads models when it is told to
    trains: int = 0  # fine-tuning jobs that it takes at a time; 0: none
    trainings: list[HostTraining] = []  # those that it has

    @property
    def jobs(self) -> dict[str, HostJobs]:
        """Its jobs beside models, by kind: whoever does not care which kinds there are reads these."""
        return {"fine-tuning": HostJobs(self.trains, self.trainings)}


class HostRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A host in the KV bucket `hosts`, written by the health monitor alone."""

    instance: str
    host: HostBeat
    state: Literal["starting", "ready", "draining", "gone"]
    updated_at: float = 0.0  # as a group's
    heard_at: float = 0.0


class LoadModel(msgspec.Struct, frozen=True, tag="load", omit_defaults=True):
    """Bring up a group that serves this model. What is there already is no error; the answer does not wait for it."""

    group: str
    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True, tag="unload", omit_defaults=True):
    """Drain a group and end it."""

    group: str
    grace: float = -1.0  # seconds that what runs may take to finish; below 0: as the executor's settings say
    force: bool = False  # end what runs at once
    sleep: bool = False  # keep the weights in the host's memory


class PullModel(msgspec.Struct, frozen=True, tag="pull", omit_defaults=True):
    """Fetch a model's files, and load nothing."""

    spec: ModelSpec


class RemoveModel(msgspec.Struct, frozen=True, tag="remove", omit_defaults=True):
    """Delete a model's files from the host's disk."""

    spec: ModelSpec


class PullAdapter(msgspec.Struct, frozen=True, tag="pull_adapter", omit_defaults=True):
    """Read an adapter, check it against its base, and keep it in the object store `adapters`."""

    name: str
    model: str
    source: str
    spec: ModelSpec  # of the base
    revision: str = ""  # of a hub name


class StartTraining(msgspec.Struct, frozen=True, tag="start_training", omit_defaults=True):
    """Train a job of the KV bucket `training_jobs`, from its last state on. What is under way is no error; the answer
    does not wait for it."""

    job: str
    tenant: str
    attempt: int


class StopTraining(msgspec.Struct, frozen=True, tag="stop_training", omit_defaults=True):
    """End a job's training here: another host has it, or nobody wants it any more. Unknown ones are no error."""

    job: str
    tenant: str
    attempt: int  # later attempts are not meant


HostCommand = LoadModel | UnloadModel | PullModel | RemoveModel | PullAdapter | StartTraining | StopTraining


class HostReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """`code` is one of `shared.errors`."""

    ok: bool
    code: str = ""
    error: str = ""
    memory: int = 0  # bytes that the model would take, where there is no room for it
    adapter: AdapterRecord | None = None


class ModelDemand(msgspec.Struct, frozen=True, omit_defaults=True):
    """Broadcast to schedulers, once a second, by a gateway that holds requests for a model of which no card is known
    yet, or batches of which no line can begin; 0 once it holds none any more."""

    model: str
    gateway: str
    waiting: int  # requests that it holds


class ModelPlacement(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the scheduler that decides says of a model, in the KV bucket `placements`; written when it changes."""

    model: str
    # Hosts that serve it, load it or have been told to, by instance; 64 of them at most.
    hosts: list[str] = []
    # Unix seconds at which a replica of a model that none serves is expected to be ready; 0: none is on its way.
    expected_at: float = 0.0
    # One of `shared.errors` where a request for it would fail at once (`model_does_not_fit`,
    # `no_group_available`); empty: requests wait.
    code: str = ""
    reason: str = ""  # one sentence: why it is not placed, and what would have to go
    # Groups of it that get no new requests: they make room for another model as soon as nothing runs in them.
    cordoned: list[str] = []
    # Requests that wait for a model that no group serves, in queues and gateways: a few are counted, many are rounded
    # up, so that each of them is no change.
    waiting: int = 0
    # The `action_at` of the order that was carried out last: the model was loaded then, or has been asked for since it
    # was unloaded. Whoever decides next does not do it again.
    done_at: float = 0.0


class WaitingModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one scheduler's queue."""

    model: str
    waiting: int = 0
    oldest: float = 0.0  # seconds that the first of them has waited
    arrived: int = 0  # requests since the scheduler started
    idle: float = 0.0  # seconds since the last of them arrived


class SchedulerDemand(msgspec.Struct, frozen=True, omit_defaults=True):
    """Broadcast among schedulers every second, and when a request arrives for a model that no group serves; models of
    the registry alone."""

    scheduler: str
    models: list[WaitingModel] = []


class ModelLease(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who decides, in the KV bucket `leases`: taken over once it has stood still for the lease's length."""

    holder: str
    beat: int = 0

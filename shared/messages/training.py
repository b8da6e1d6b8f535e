"""Fine-tuning jobs: what the services keep of them in NATS, and what hosts are told.

gateway ──creates, checks the files──▶ KV `training_jobs` ◀──host, attempt── the scheduler that decides
                                          ▲     └── StartTraining, StopTraining ──▶ hosts.<instance>.control
    host ── progress, checkpoints, result ┘         examples, checkpoints ◀──▶ object store `training`

Every change of a job is a compare-and-set. A host writes only while the job is its own: `host` and `attempt` are those
that it was told. As in `shared.messages`: fields are only ever added, at the end and with a default.
"""

from typing import Any, Literal

import msgspec

from shared.messages.jobs import JobRecord
from shared.messages.registry import ModelSpec

TrainingStatus = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
# States that a job does not leave.
TRAINING_OVER: tuple[TrainingStatus, ...] = ("succeeded", "failed", "cancelled")
TrainingMethod = Literal["supervised", "dpo"]
Schedule = Literal["cosine", "linear", "constant"]
Optimizer = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]

MAX_EVENT_MESSAGE = 1000  # characters of an event


class Hyperparameters(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a job trains. What is 0 or empty is `auto`, and is chosen when the examples are known."""

    epochs: int = 0
    batch_size: int = 0  # examples (of DPO: pairs) of one optimizer step, on all hosts together
    # Of the learning rate that the method has for LoRA: 2e-4 supervised, 5e-6 DPO.
    learning_rate_multiplier: float = 0.0
    beta: float = 0.0  # of DPO: how far the model may go from its base
    rank: int = 16
    alpha: float = 0.0  # 0: twice the rank. The adapter adds alpha / rank times its product
    dropout: float = 0.0  # of the inputs of LoRA's factors
    # Last parts of the linears' names (`q_proj`); empty: all linears but the output layer.
    targets: list[str] = []
    max_tokens: int = 0  # of an example; 0: the model's context
    truncate: bool = False  # whether longer examples are cut at their end; else they are a fault of the file
    schedule: Schedule = "cosine"
    warmup_ratio: float = 0.03  # share of the steps in which the learning rate rises
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: Optimizer = "adamw"
    # Hosts that train it side by side, each a part of every step's examples; fixed, so that the result is.
    replicas: int = 1

    @property
    def scale(self) -> float:
        """What an adapter's product is multiplied by."""
        return (self.alpha or 2.0 * self.rank) / self.rank


class TrainingError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job has failed, as OpenAI shows it. `code` is one of `shared.errors`, or of the checks of a file."""

    code: str
    message: str
    param: str = ""


class TokenizedData(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a job's examples lie, as `TrainingData` in MessagePack."""

    object_name: str  # in the object store `training`
    examples: int  # of DPO: pairs
    tokens: int  # of all examples together
    trained: int  # of these the ones that a loss is taken of
    longest: int
    validation_examples: int = 0
    validation_tokens: int = 0
    bytes: int = 0  # of the object; 0: not known


class Examples(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokenized examples, end to end; of DPO the preferred text of pair i is example 2i, the other one 2i + 1.

    A token with the weight 0 is context: no loss is taken of predicting it."""

    tokens: bytes = b""  # int32, little-endian
    weights: bytes = b""  # one byte a token, 0 or 1
    lengths: bytes = b""  # uint32, little-endian: tokens of each example, never 0


class TrainingData(msgspec.Struct, frozen=True):
    """What a job learns from."""

    training: Examples
    validation: Examples = Examples()


class TrainingState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a job goes on from after a host's death: it counts once the job's record names it."""

    step: int  # optimizer steps that it holds
    object_name: str  # in the object store `training`: a safetensors file
    bytes: int
    digest: str  # BLAKE2b of the file, 32 bytes in hexadecimal


class TrainingMetrics(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one optimizer step, or of the examples for validation after it. Means are over tokens with a weight; of DPO
    over pairs."""

    step: int
    train_loss: float = 0.0
    # Share of tokens that the model finds likeliest; of DPO share of pairs that it orders right.
    train_accuracy: float = 0.0
    learning_rate: float = 0.0
    grad_norm: float = 0.0  # before clipping
    tokens: int = 0  # trained on so far, context included
    seconds: float = 0.0  # that the step took, pauses excluded
    valid_loss: float | None = None
    valid_accuracy: float | None = None
    margin: float | None = None  # of DPO: by how much the reward of the preferred text is larger
    valid_margin: float | None = None


class TrainedAdapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter that a job has made: at the end of an epoch, or its result. Its files lie in the object store
    `adapters` under the digest."""

    step: int
    digest: str
    rank: int
    bytes: int
    created: int  # Unix seconds
    metrics: TrainingMetrics
    name: str = ""  # under which it is registered; empty: not yet


class TrainingJob(JobRecord, frozen=True, omit_defaults=True):
    """A job in the KV bucket `training_jobs`. Times are unix seconds, 0: not yet."""

    model: str  # name of its base, as the catalog resolves it
    method: TrainingMethod
    training_file: str
    training_object: str  # in the object store `files`
    seed: int
    hyperparameters: Hyperparameters = Hyperparameters()
    validation_file: str = ""
    validation_object: str = ""
    suffix: str = ""
    status: TrainingStatus = "validating_files"
    # What its tenant wants of it: who trains it obeys, and writes the status that comes of it.
    wanted: Literal["run", "pause", "cancel"] = "run"
    # What a host needs to find the base's files, from the moment that it is queued; without a `source` the base is
    # the model that the host was started with.
    base: ModelSpec | None = None
    data: TokenizedData | None = None
    host: str = ""  # the executor that trains it; empty: it waits for one
    # Grows each time that a host is told to train it: what an earlier one still does is void.
    attempt: int = 0
    # Further executors, where it has more than one replica; of use while `host` is set.
    helpers: list[str] = []
    waiting_for: str = ""  # why no host has it: one sentence
    started_at: float = 0.0
    finished_at: float = 0.0
    steps: int = 0  # in all; 0: not known yet
    metrics: TrainingMetrics | None = None  # of the last step that was told, at most every other second
    expected_at: float = 0.0  # when it is expected to end
    state: TrainingState | None = None
    adapters: list[TrainedAdapter] = []  # of the ends of its epochs, the last ones
    # Set by the host when the last step is done: what is left is to publish it.
    result: TrainedAdapter | None = None
    metrics_object: str = ""  # in the object store `training`: CSV of its steps
    result_files: list[str] = []
    fine_tuned_model: str = ""
    trained_tokens: int = 0
    error: TrainingError | None = None
    # That compute it, as its first host has chosen: with others the sums would be others. 0: it never ran.
    threads: int = 0
    crashes: int = 0  # times that its trainer has ended by a fault since it has written its last state
    retry_at: float = 0.0  # before then no host is told to train it, in unix seconds
    # `host:port` where the trainer of its first replica waits for the others in this attempt; empty: not yet.
    meeting: str = ""
    secret: str = ""  # of this attempt: what its replicas show each other
    tries: int = 0  # times in a row that a gateway could not do its part (check the files, publish a result)
    blocked_since: float = 0.0  # when the first of them was, in unix seconds; 0: there is none
    look_at: float = 0.0  # before then no gateway takes it, in unix seconds
    # Bytes that it may keep in the object stores while it is not clean (`shared.training_storage`), of its tenant's
    # quota; 0: an older gateway has queued it, and nobody counts.
    storage: int = 0
    # The executor whose trainer is at work on it; an attempt that begins and finds one knows that it was lost.
    runner: str = ""
    losses: int = 0  # executors that were lost so
    resumed_from: int = 0  # the step whose state the last of these attempts went on from

    @property
    def hosts(self) -> list[str]:
        """That train it, in the order of its replicas; empty: it waits for them."""
        return [self.host, *self.helpers] if self.host else []


class TrainingEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of a job, in the KV bucket `training_events` (`shared.nats.training`). What is said again after a death is the
    same entry: see `event_name`."""

    job: str
    step: int
    kind: str  # what happened, in snake_case: `job_queued`, `step`, `checkpoint`, ...
    level: Literal["info", "warn", "error"]
    message: str
    created: float  # Unix seconds
    # Of events of the type `metrics`; others are of the type `message`.
    metrics: TrainingMetrics | None = None
    data: dict[str, Any] = {}


def event_name(job: str, step: int, kind: str, attempt: int = 0) -> str:
    """Its name within the tenant: `<job>-<step>-<attempt>-<kind>`, which sorts as it happened. `attempt`: 0 for what is
    true once, such as a step."""
    return f"{job}-{step:09d}-{attempt:04d}-{kind}"


def steps_of(hyperparameters: Hyperparameters, examples: int) -> int:
    """Optimizer steps of a job whose `epochs` and `batch_size` are chosen; the last one of an epoch may be smaller."""
    return hyperparameters.epochs * -(-examples // hyperparameters.batch_size)

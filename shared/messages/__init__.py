"""Every message on the bus, typed: one definition, MessagePack on the wire.

Messages on the hot path (token frames) are arrays on the wire; all others are maps with their
field names, so that a program in any language can read and write them. Fields are only ever added,
at the end and with a default: services of two versions can talk during a rolling update.

Here: requests with their sampling parameters, dispatch, token frames, control, heartbeats, what lies in buckets. In
modules of their own: what a gateway needs to serve a generation (`records`), batches, KV hand-over, debugging.
"""

from typing import Any, Literal

import msgspec

Lane = Literal["recovery", "interactive", "batch"]
LANES: tuple[Lane, ...] = ("recovery", "interactive", "batch")
"""Intake lanes, most urgent first."""

FinishReason = Literal["", "stop", "length", "cancelled", "error"]
"""Why a generation ended; empty while it goes on."""

ServiceName = Literal["gateway", "scheduler", "health-monitor", "executor"]
GroupStatus = Literal["starting", "ready", "busy", "hung", "draining", "gone"]
ServiceStatus = Literal["starting", "ready", "draining", "gone"]


# --- generation requests -------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Neutral values mean "off"."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bits. The random number of a token depends on (seed, position) alone, so that a
    continuation on another ring draws what the first ring would have drawn."""
    repetition_penalty: float = 1.0
    """Over prompt and output, as in CTRL (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Over the output only, as in OpenAI's API."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1
    """-1: none; 0: of the chosen token; k: also of the k most likely tokens."""
    min_tokens: int = 0
    """Output tokens before which none of the request's stop tokens is drawn."""
    allowed_token_ids: list[int] = []
    """The only tokens that may be drawn; empty: all."""
    bad_words: list[list[int]] = []
    """Tokens that must not stand in the output one after the other."""


class Grammar(msgspec.Struct, frozen=True):
    """What the output's text must match. The ring masks the tokens that cannot follow; where an attempt
    continues another's tokens, it brings its state up to date with them first."""

    kind: Literal["json_schema", "regex", "lark"]
    """`json_schema`: a JSON Schema (`{"type": "object"}` is any object); `lark`: a grammar in Lark's notation."""
    text: str


class GenerationRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation: what a ring needs to produce it, and who reads its tokens."""

    generation_id: str
    request_id: str
    """The client's `x-request-id`: for logs and traces, not an identity (n generations share it)."""
    model: str
    consumer: str
    """Whose token subject the frames go to: a gateway's or batch runner's instance id."""
    prompt: list[int]
    max_tokens: int
    """Output tokens in all, those in `generated` included."""
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []
    """Ends the generation; the model's end-of-sequence ids among them unless they are ignored."""
    generated: list[int] = []
    """Tokens that an earlier attempt produced: the ring continues after them."""
    attempt: int = 0
    session: str = ""
    """Key of the conversation for sticky routing; empty: none."""
    lane: Lane = "interactive"
    tenant: str = ""
    deadline: float = 0.0
    """Unix seconds after which nobody waits for the first token; 0: none."""
    grammar: Grammar | None = None
    prediction: list[int] = []
    """What the output is expected to be: drafts are taken from it. Changes how fast it comes and nothing else."""
    embed: bool = False
    """The prompt's vector is wanted and no output: `max_tokens` is 1, and the only entry has a `vector`."""
    traceparent: str = ""
    """W3C Trace Context of the span that this came from, where the request is sampled; empty: nobody traces it."""
    tracestate: str = ""
    prompt_logprobs: int = -1
    """Log probabilities of the prompt's tokens, told with the first output: -1: none; 0: of the tokens alone; k: also
    of the k most likely ones at each position. Not of a later attempt that brings `generated` tokens: they came with
    these. With them, and without any, `max_tokens` may be 0: then nothing is generated."""
    claim: int = 0
    """The claim under which the gateway that handed it in owns the generation; see `Claimed`."""
    cache_salt: str = ""
    """Requests share KV blocks only with those of the same salt; empty: with all that have none."""
    priority: int = 0
    """Among a tenant's own requests of a lane that wait the one with the least goes first."""
    suspected: str = ""
    """Why the ring died that computed an earlier attempt when it did (`RingDeath.cause`): this may be what killed it,
    and is computed in steps of its own. Empty: it is not suspected."""


# --- dispatch and control (scheduler or gateway → leader) ----------------------------------------


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a ring did not take a request. `code` is one of `shared.errors`."""

    generation_id: str
    code: str
    message: str
    retryable: bool = True


class GroupLoad(msgspec.Struct, frozen=True):
    """How full a group is."""

    running: int = 0
    """Sequences in the current batch."""
    waiting: int = 0
    """Accepted sequences that are not in the batch yet."""
    waiting_tokens: int = 0
    """Prompt tokens not computed yet."""
    free_blocks: int = 0
    """KV blocks that can be had at once (free, or cached but unused)."""
    total_blocks: int = 0
    version: int = 0
    """Grows with each report of the ring's leader: of two reports the larger is the newer."""
    slots: int = 0
    """Sequences that the batch has room for; 0: not known."""
    step_seconds: float = 0.0
    """What a step takes that computes no prompt, lately; 0: not measured yet."""
    prompt_tokens_per_second: float = 0.0
    """How fast prompts are computed, lately; 0: not measured yet."""


class DispatchBatch(msgspec.Struct, frozen=True):
    """1-128 requests for one group."""

    requests: list[GenerationRequest]
    epoch: int = 0
    """The newest life of the group's ring that the scheduler knows of; an older ring that still listens
    under the group's name has been replaced, and takes nothing more."""


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
    attempt: int = -1
    """-1: the client has gone, whatever the attempt. Else only attempts up to this one are withdrawn: they
    end with a retryable error, and a late command does not hit their successor."""
    claim: int = -1
    """The claim under which its sender decides for these generations: where a newer one is known, the sender
    owns them no more and is ignored. -1: whoever owns them, as when a client asks for it."""


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """Another gateway owns these generations from now on: what an earlier owner still decides about them is void.

    A claim is the revision of the generation's entry in the bucket `generations`; 0: it was never claimed."""

    generation_ids: list[str]
    claim: int


class Drain(msgspec.Struct, frozen=True, omit_defaults=True, tag="drain"):
    """Accept nothing more, finish what runs, hand back what has not finished in time, then leave."""

    grace: float = -1.0
    """Seconds that what runs may take to finish; below 0: as the executor's settings say."""


class Undrain(msgspec.Struct, frozen=True, tag="undrain"):
    """Stay after all, and accept requests again. Too late for a group that has left."""


ControlCommand = Cancel | Drain | Undrain | Claimed


class ControlReply(msgspec.Struct, frozen=True, omit_defaults=True):
    ok: bool
    error: str = ""


# --- tokens (leader → gateway, and the journal) --------------------------------------------------


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one token, and of the most likely ones at its position (descending)."""

    logprob: float
    top: list[tuple[int, float]] = []


class TokenEntry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The new tokens of one generation."""

    generation_id: str
    attempt: int
    position: int
    """Index of `tokens[0]` among the generation's output tokens, counted from 0 over all attempts."""
    tokens: list[int]
    finish: FinishReason = ""
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the KV cache; set in the attempt's first entry that has tokens."""
    error_code: str = ""
    error: str = ""
    retryable: bool = False
    vector: bytes = b""
    """Of a request to embed, with finish "stop" and no tokens: float32, little-endian, of length 1."""
    prompt_scores: bytes = b""
    """Where the request has `prompt_logprobs`, in its entry at position 0 that has tokens or ends it: of each token of
    the prompt but the first, little-endian: float32 log probability, int32 rank (1: the most likely), and
    `prompt_logprobs` times (int32 token, float32 log probability), the most likely first."""
    suspected: str = ""
    """As the request's; told as the attempt is taken on, for whoever takes the generation over."""
    fingerprint: str = ""
    """Of the ring (`ModelCard.fingerprint`); told as the attempt is taken on."""


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """All new tokens of one step for one consumer."""

    group: str
    """Empty when a scheduler ends a generation that no group has taken."""
    epoch: int
    """Life of the group's ring: grows with each restart, so that the dead can be told from the living."""
    step: int
    entries: list[TokenEntry]


class CancelRequest(msgspec.Struct, frozen=True):
    """Broadcast to schedulers, for generations whose group the gateway does not know yet."""

    generation_ids: list[str]
    claim: int = -1
    """As a `Cancel`'s."""


# --- health --------------------------------------------------------------------------------------


class RankBeat(msgspec.Struct, frozen=True):
    """Progress of one rank."""

    rank: int
    pid: int
    step: int
    """Steps finished since the ring started."""
    progress: int
    """Grows within a step too (once per layer): standing still with work in flight means hung."""
    in_flight: bool
    """Whether the rank has begun a step that it has not finished."""


class GroupWork(msgspec.Struct, frozen=True):
    """What a ring has done since it started."""

    steps: int = 0
    seconds: float = 0.0
    """Time that these steps took."""
    tokens: int = 0
    """Prompt tokens computed and output tokens generated."""


RING_CAUSES = ("external", "out_of_memory", "crashed", "hung")
"""What rings die of. All but the first may be of the making of a request."""


class RingDeath(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a ring has died."""

    epoch: int
    cause: str = "external"
    """`external`, or what a request may have made: `out_of_memory`, `crashed`, `hung`."""
    suspects: list[str] = []
    """Generations in the steps that were under way; none for an external cause."""
    more: bool = False
    """Whether not all of them are named: then every generation in the ring is suspected."""

    def suspects_only(self, generation_id: str) -> bool:
        """Whether that one was computed alone."""
        return self.suspects == [generation_id] and not self.more

    def may_be_of(self, generation_id: str) -> bool:
        """Whether computing that one may be what the ring has died of."""
        return self.cause != "external" and (self.more or generation_id in self.suspects)


class GroupBeat(msgspec.Struct, frozen=True):
    """What an executor says of its group."""

    group: str
    model: str
    epoch: int
    state: Literal["starting", "ready", "draining"]
    ranks: list[RankBeat]
    load: GroupLoad
    loaded: float = 0.0
    """Share of the weights that has been read, 0 to 1."""
    message: str = ""
    """Why the group is not ready, where there is something to say."""
    work: GroupWork = GroupWork()
    kv_bytes: int = 0
    """Most memory that the KV caches of all ranks take once they have been filled."""
    death: RingDeath | None = None
    """Of the group's last ring; of this one where it stands still: so it would have died, were it given up now."""


class SetLogLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """To one instance of a service: what it shall log from now on. Its ranks do as it does."""

    level: str = ""
    """debug, info, warning or error; empty: as it stands, this only asks; `usual`: as its settings say."""
    seconds: float = 0.0
    """For how long; 0: until it is changed again."""


class LogLevel(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `SetLogLevel`."""

    level: str
    usual: str
    """As the settings say."""
    until: float = 0.0
    """Unix seconds at which it is `usual` again; 0: it stays."""
    error: str = ""


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Published every second by every service instance."""

    service: ServiceName
    instance: str
    pid: int
    state: ServiceStatus
    address: str = ""
    """`host:port` of /health, /ready and /metrics (the gateway's: of its API)."""
    group: GroupBeat | None = None
    grpc_address: str = ""
    """`host:port` of the gateway's gRPC API, where it serves one."""
    pid_namespace: str = ""
    """Where `pid`, and those of the ranks, mean this process (`shared.process.pid_namespace`)."""
    sent_at: float = 0.0
    """Unix seconds by the sender's clock; 0: not told."""


class ServiceRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A service instance in the KV bucket `services`, written by the health monitor alone."""

    name: ServiceName
    instance: str
    pid: int
    state: ServiceStatus
    address: str = ""
    updated_at: float = 0.0
    heard_at: float = 0.0
    """As a group's."""
    pid_namespace: str = ""
    """As a heartbeat's."""


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
    updated_at: float = 0.0
    """Unix seconds at which this was true, by the monitor's clock."""
    weight: float = 1.0
    """How fast the group is, against its own past and its peers, 0.05 to 1; below 1 it is degraded."""
    heard_at: float = 0.0
    """Unix seconds of the heartbeat that this is known from: of two monitors the one with the later is right."""
    kv_bytes: int = 0
    """As a heartbeat's."""


class GroupEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group has come up, is draining, or is lost (`hung`, `gone`, or a new epoch took its place)."""

    group: str
    model: str
    epoch: int
    """The ring's life that the event is about: for a loss, the one that ended."""
    kind: Literal["up", "draining", "down"]
    reason: str = ""
    at: float = 0.0
    """Unix seconds by the monitor's clock, as a record's `updated_at`: tells which of the two is newer."""
    death: RingDeath | None = None
    """Of a loss whose cause the executor has told; None: it was seen from outside alone."""


# --- models and sessions -------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that a group serves, in the KV bucket `models`; written by group leaders."""

    model: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    tokenizer: str
    """Name of the tokenizer bundle in the object store `tokenizers`; empty: the stub's tokens."""
    created: int
    """Unix seconds."""
    defaults: dict[str, Any] = {}
    """Sampling defaults from the model's generation_config.json."""
    tool_parser: str = "auto"
    """How the model writes tool calls, as its executor's settings say; `auto`: as its chat template shows."""
    reasoning_parser: str = "auto"
    """The same for its reasoning."""
    fingerprint: str = ""
    """Of the model and all of the engine's settings that a seed's text depends on; empty: not known."""
    embedding_size: int = 0
    """Numbers in the vector of a request to embed; 0: the model gives none."""
    exact: bool = False
    """Whether a text depends on nothing but what `fingerprint` is of and the request: not on what else is computed,
    on what was found in a cache, or on a ring's death in its middle."""


class TokenizerBundle(msgspec.Struct, frozen=True):
    """The files a gateway needs to speak a model's text, by name (`tokenizer.json`, ...)."""

    files: dict[str, bytes]


class SessionPin(msgspec.Struct, frozen=True):
    """Where a session's KV cache lives, in the KV bucket `sessions`; written by schedulers."""

    group: str
    epoch: int
    moved_at: float = 0.0
    """Unix seconds at which the session left a ring that was too busy; 0: it has not."""

"""What one request, connection or tenant may hold: every bound in one table, which is data alone.

Checks, the OpenAPI document and the table of docs/security.md are made from it (`python -m tests.docs limits`). To add
a bound: a row here, and `Limit.length` or `Limit.up_to` in the type of the field that it bounds, or
a check that refuses by `Limit.cited` where it is held.
"""

import re
from typing import Any, Literal

import msgspec

Unit = Literal["entries", "characters", "bytes", "tokens", "seconds", "levels", "per minute", "frames"]
# Of what each one has the bound for itself: each request, each scheduler, ...
Holder = Literal["request", "connection", "key", "tenant", "gateway", "scheduler", "executor", "NATS"]


class Limit(msgspec.Struct, frozen=True):
    """One bound."""

    value: int  # the default where a setting changes it; 0: it depends on the model, as `bounds` says
    unit: Unit
    bounds: str  # what may be no more, as a phrase
    holder: Holder = "request"
    setting: str = ""  # the environment variable that changes it; empty: none does
    name: str = ""  # its own below, in lower case

    def length(self, **more: Any) -> msgspec.Meta:
        """In the type of a field: so many characters of a text, or entries of an array or object, at most. `more`:
        what else `msgspec.Meta` says."""
        return msgspec.Meta(max_length=self.value, extra={"limit": self, **more.pop("extra", {})}, **more)

    def up_to(self, least: int) -> msgspec.Meta:
        """In the type of a field: a number from `least` to the limit."""
        return msgspec.Meta(ge=least, le=self.value, extra={"limit": self})

    def cited(self, value: int | None = None) -> str:
        """How a refusal names it. `value`: as it is set, or as the model has it."""
        number = self.value if value is None else value
        changed = f"{self.setting} changes it" if self.setting else "fixed"
        return f"limit {self.name}: {number:,} {self.unit}, {changed}"


# --- fields of requests for text, at gateways and in executors -------------------------------------

CHOICES = Limit(128, "entries", "choices of all prompts together")
LOGPROBS = Limit(20, "entries", "most likely tokens returned at each position")
PROMPT_LOGPROBS = Limit(
    1 << 16, "entries", "log probabilities returned for one prompt, counting those of the most likely tokens"
)
REQUEST_PROMPT_LOGPROBS = Limit(1 << 17, "entries", "log probabilities returned for all prompts and choices")
PROMPT_TOKEN_IDS = Limit(1 << 20, "entries", "prompt token ids returned for all choices (`return_token_ids`)")
STOP_STRINGS = Limit(16, "entries", "stop strings")
STOP_CHARACTERS = Limit(1024, "characters", "a stop string")
STOP_TOKENS = Limit(128, "entries", "stop token ids")
LOGIT_BIASES = Limit(1024, "entries", "tokens with a bias")
ALLOWED_TOKENS = Limit(4096, "entries", "allowed token ids")
BAD_WORDS = Limit(128, "entries", "bad words")
BAD_WORD_CHARACTERS = Limit(64, "characters", "a bad word")
BAD_WORD_TOKENS = Limit(256, "tokens", "a bad word")
PREDICTION = Limit(0, "tokens", "a prediction: the model's context")
RING_STOP_TOKENS = Limit(256, "entries", "a generation's stop token ids with the model's own")
RING_BAD_WORDS = Limit(256, "entries", "a generation's bad words, each in up to two spellings")
RING_TEXT = Limit(1024, "characters", "each name, id and header that a generation sends to its group")
USER_CHARACTERS = Limit(512, "characters", "`user` and `safety_identifier`; logs show 64 of them")
CACHE_SALT = Limit(256, "characters", "`cache_salt`")
METADATA_ENTRIES = Limit(16, "entries", "entries of `metadata`")
METADATA_KEY = Limit(64, "characters", "a key of `metadata`")
METADATA_VALUE = Limit(512, "characters", "a value of `metadata`")
TOOLS = Limit(128, "entries", "tools")
FUNCTION_NAME = Limit(128, "characters", "the name of a function, its namespace counted")
SCHEMA_NAME = Limit(64, "characters", "the name of an answer's schema")
GRAMMAR_CHOICES = Limit(1024, "entries", "texts of which an answer is one")
STRUCTURAL_TRIGGERS = Limit(64, "entries", "triggers of a structural tag")
GRAMMAR_BYTES = Limit(256 << 10, "bytes", "the schema or grammar of an answer, in UTF-8")
NESTING = Limit(100, "levels", "objects and arrays inside each other")
LOGPROB_TOKEN_IDS = Limit(64, "entries", "tokens whose log probabilities behind a prompt are asked for")
MODEL_LABELS = Limit(4096, "entries", "classes of a model that classifies")
MODEL_PROMPTS = Limit(64 << 10, "characters", "a model's own prompts, with their names")
EMBEDDING_INPUTS = Limit(2048, "entries", "inputs of a request for embeddings or classes")
VECTORS_IN_HEADER = Limit(
    512, "entries", "inputs of a request for vectors as `bytes`, whose places a header tells; `bytes_only` does without"
)
SCORED_TEXTS = Limit(2048, "entries", "documents of a rerank request, pairs of a score request")
TRUNCATED_TEXT = Limit(
    64,
    "characters",
    "a text before `truncate_prompt_tokens` or `max_tokens_per_doc`, and a conversation before its chat template, for "
    "each token of the longest prompt (256 Ki at least)",
)
SCORED_CHARACTERS = Limit(
    8 << 20,
    "characters",
    "documents of a rerank or score request together, query, instruction and template counted with each of them",
)

# --- conversations and bodies ----------------------------------------------------------------------

MESSAGES = Limit(4096, "entries", "messages of a conversation")
PARTS = Limit(4096, "entries", "parts of all messages together")
CALLS = Limit(4096, "entries", "tool calls of all messages together")
ITEMS = Limit(4096, "entries", "items of a response's input")
INPUT_FILES = Limit(32, "entries", "files among the parts of all messages together")
INPUT_FILE_BYTES = Limit(4 << 20, "bytes", "the same files together")
GENERATION_BYTES = Limit(
    16 << 20, "bytes", "what all generations of a request put into the queue", setting="RYZANSTEIN_GENERATION_BYTES"
)
BODY = Limit(4 << 20, "bytes", "the body, or a WebSocket message", setting="RYZANSTEIN_BODY_LIMIT")
PROMPT_TOKENS = Limit(0, "tokens", "a prompt; 0: the model's context", setting="RYZANSTEIN_PROMPT_LIMIT")
TEMPLATE_SECONDS = Limit(2, "seconds", "CPU time of a chat template for a conversation")
TEMPLATE_MEMORY = Limit(512 << 20, "bytes", "address space of the process that renders chat templates")
TEMPLATE_TEXT = Limit(64 << 20, "bytes", "the prompt that a chat template makes, in UTF-8")
RESPONSE_CHAIN = Limit(
    1000, "entries", "responses behind `previous_response_id`; responses to whose items a request refers"
)
RESPONSE_HISTORY = Limit(
    64,
    "bytes",
    "items behind `previous_response_id`, for each token of the model's context (64 KiB at least); with "
    "`truncation` auto the newest so many",
)
SUMMARY_TOKENS = Limit(1024, "tokens", "a conversation that is made shorter")
CONVERSATION_ITEMS = Limit(4096, "entries", "items of a conversation")
ADDED_ITEMS = Limit(20, "entries", "items that a request adds to a conversation")
CONVERSATION_RESPONSES = Limit(64, "entries", "responses of a conversation that have not ended")
RESPONSE_BYTES = Limit(64 << 20, "bytes", "a stored response that is read, decompressed")
HISTORY_BYTES = Limit(
    16 << 20,
    "bytes",
    "items of earlier responses and conversations that a request reads or lists, decompressed, each reference to one "
    "counted; lists have shorter pages instead",
    setting="RYZANSTEIN_HISTORY_BYTES",
)
HISTORY_HELD = Limit(
    256 << 20,
    "bytes",
    "such items of all requests that are being prepared, a quarter for each tenant",
    "gateway",
    "RYZANSTEIN_HISTORY_HELD_BYTES",
)
HISTORY_READS = Limit(256 << 20, "bytes", "stored responses that a request reads for their items, decompressed")
UPLOAD_FIELDS = Limit(32, "entries", "fields of an upload's form")
UPLOAD_FIELD = Limit(4096, "bytes", "a field of an upload's form beside the file")
UPLOAD_FIELD_NAME = Limit(256, "characters", "the name of a field of an upload's form")
UPLOAD_FORM = Limit(64 << 10, "bytes", "an upload's body that is not its file")
CUSTOM_ID = Limit(512, "characters", "the custom_id of a request in a batch")
CONTEXT_MANAGEMENT = Limit(1, "entries", "ways in which a response shortens its context")
UPLOAD_NAME = Limit(255, "characters", "the name of a file that is uploaded in parts")
TRAINING_SUFFIX = Limit(64, "characters", "the suffix of a fine-tuned model's name")
LORA_TARGETS = Limit(32, "entries", "names in `lora.target_modules`")
LORA_TARGET = Limit(64, "characters", "one of those names")
UPLOAD_PARTS = Limit(10_000, "entries", "parts of an upload")
UPLOAD_PART = Limit(64 << 20, "bytes", "a part of an upload")
UPLOAD = Limit(512 << 20, "bytes", "a file", setting="RYZANSTEIN_FILE_LIMIT")

TRAINING_EXAMPLES = Limit(200_000, "entries", "examples of a fine-tuning file", setting="RYZANSTEIN_TRAINING_EXAMPLES")
TRAINING_TOKENS = Limit(
    1 << 24,
    "tokens",
    "the examples of a fine-tuning job, those for validation among them",
    setting="RYZANSTEIN_TRAINING_TOKENS",
)

# --- connections -----------------------------------------------------------------------------------

HEADERS = Limit(128, "entries", "headers of a request, trailers among them", "connection")
HEAD = Limit(64 << 10, "bytes", "a request's line and headers", "connection", "RYZANSTEIN_HEAD_LIMIT")
PIPELINED = Limit(16, "entries", "requests that wait for the answer to an earlier one", "connection")
WEBSOCKET_FRAMES = Limit(
    10_000, "frames", "WebSocket frames, one for each message not counted; each second takes 1,000 off", "connection"
)
SOCKET_GENERATIONS = Limit(
    256, "entries", "generations in flight on one WebSocket", "connection", "RYZANSTEIN_MAX_GENERATIONS_PER_SOCKET"
)

HEAD_SECONDS = Limit(
    10,
    "seconds",
    "a TLS handshake, and the receipt of a request's line and headers",
    "connection",
    "RYZANSTEIN_HEAD_TIMEOUT",
)
UNREAD_SECONDS = Limit(
    60, "seconds", "time in which a client of REST or a WebSocket reads nothing of its answer", "connection"
)
GRPC_CALLS = Limit(1024, "entries", "gRPC calls at a time", "connection")
GRPC_PUBLIC_CALLS = Limit(16, "entries", "gRPC calls at a time that need no key", "connection")
GRPC_PUBLIC_MESSAGE = Limit(4 << 10, "bytes", "the message of a gRPC call that needs no key")
GRPC_METADATA = Limit(
    16 << 10, "bytes", "the metadata of a gRPC call, 32 for each entry; beyond four times that the connection ends"
)
GRPC_UNTAKEN = Limit(
    16 << 20, "bytes", "gRPC messages that are incomplete or not consumed yet; one body at least", "connection"
)
GRPC_UNREAD = Limit(
    64 << 10, "bytes", "gRPC answers that the client does not read, before no more is read from it", "connection"
)
GRPC_OWED = Limit(
    64 << 20,
    "bytes",
    "gRPC answers queued for a client that does not read, before its connection is closed",
    "connection",
)
GRPC_KEEPALIVE = Limit(
    60,
    "seconds",
    "time that a gRPC client leaves answers unread, or has no admitted call",
    "connection",
    "RYZANSTEIN_GRPC_KEEPALIVE",
)
GRPC_WORK = Limit(
    100_000,
    "frames",
    "frames of a gRPC client, each counted by its work: a call that is refused or reset as 100, a message as 20, each "
    "stream that a change of windows concerns, KiB of an inflated message and 16 bytes of metadata as one. A call that "
    "is let in or begins takes its own off, one that is answered 100 more, each message to the client 2, each second "
    "10,000",
    "connection",
)

# --- tenants ---------------------------------------------------------------------------------------

TENANT_FILE_BYTES = Limit(1 << 30, "bytes", "files together", "tenant", "RYZANSTEIN_TENANT_FILE_BYTES")
TENANT_FILES = Limit(10_000, "entries", "files", "tenant", "RYZANSTEIN_TENANT_FILES")
TENANT_BATCHES = Limit(200, "entries", "unfinished batches", "tenant", "RYZANSTEIN_TENANT_BATCHES")
KNOWN_BATCHES = Limit(10_000, "entries", "known batches; the oldest that have ended are forgotten", "tenant")
TENANT_TRAINING_JOBS = Limit(16, "entries", "unfinished fine-tuning jobs", "tenant", "RYZANSTEIN_TENANT_TRAINING_JOBS")
TENANT_TRAINING_BYTES = Limit(
    3 << 30,
    "bytes",
    "fine-tuned models, and what unfinished fine-tuning jobs may come to: examples, states, checkpoints",
    "tenant",
    "RYZANSTEIN_TENANT_TRAINING_BYTES",
)
TENANT_FINE_TUNED_MODELS = Limit(
    512,
    "entries",
    "fine-tuned models and checkpoints, four of each unfinished job counted",
    "tenant",
    "RYZANSTEIN_TENANT_FINE_TUNED_MODELS",
)
KNOWN_TRAINING_JOBS = Limit(
    1000, "entries", "known fine-tuning jobs; the oldest that have ended are forgotten, their models stay", "tenant"
)
TRAINING_EVENTS = Limit(
    10_000, "entries", "steps of a fine-tuning job that have an event; the newest are kept", "tenant"
)
EVENT_STREAMS = Limit(32, "entries", "streams of fine-tuning jobs' events at one gateway", "tenant")
TENANT_RESPONSE_BYTES = Limit(
    64 << 20,
    "bytes",
    "stored responses and chat completions, compressed; the oldest are deleted",
    "tenant",
    "RYZANSTEIN_TENANT_RESPONSE_BYTES",
)
TENANT_RESPONSES = Limit(
    10_000,
    "entries",
    "stored responses, and as many stored chat completions; the oldest are deleted",
    "tenant",
    "RYZANSTEIN_TENANT_RESPONSES",
)
TENANT_RECORD_BYTES = Limit(
    128 << 20,
    "bytes",
    "requests beside the journal; the oldest are deleted, and cannot be resumed",
    "tenant",
    "RYZANSTEIN_TENANT_RECORD_BYTES",
)

UNKNOWN_IDS = Limit(600, "per minute", "lookups at one gateway of generation ids that do not exist", "tenant")

# --- services --------------------------------------------------------------------------------------

CONNECTIONS = Limit(
    10_000,
    "entries",
    "connections of all ports, TLS handshakes among them, as far as the process may open files",
    "gateway",
    "RYZANSTEIN_MAX_CONNECTIONS",
)
RESERVED_CONNECTIONS = Limit(
    32, "entries", "connections beyond those, for `/health`, `/ready`, `/metrics` and `grpc.health.v1`", "gateway"
)
OWED = Limit(
    512 << 20,
    "bytes",
    "answers of all ports that clients have not read; those that were left most are disconnected",
    "gateway",
    "RYZANSTEIN_OWED_LIMIT",
)
ARRIVING = Limit(
    256 << 20,
    "bytes",
    "incomplete requests of all ports; the connections with the most are closed",
    "gateway",
    "RYZANSTEIN_ARRIVING_LIMIT",
)
GENERATIONS = Limit(4096, "entries", "generations in flight", "gateway", "RYZANSTEIN_MAX_GENERATIONS")
TENANT_GENERATIONS = Limit(
    2048, "entries", "generations in flight of one tenant", "gateway", "RYZANSTEIN_MAX_TENANT_GENERATIONS"
)
COLD_REQUESTS = Limit(
    1024, "entries", "requests held for models that were never loaded", "gateway", "RYZANSTEIN_COLD_REQUESTS"
)
COLD_MODEL_REQUESTS = Limit(256, "entries", "of those for one model", "gateway", "RYZANSTEIN_COLD_MODEL_REQUESTS")
COLD_BYTES = Limit(
    256 << 20, "bytes", "requests held for models that were never loaded", "gateway", "RYZANSTEIN_COLD_BYTES"
)
COLD_MODEL_BYTES = Limit(64 << 20, "bytes", "of those for one model", "gateway", "RYZANSTEIN_COLD_MODEL_BYTES")
PREFILLS = Limit(64, "entries", "a tenant's sessions whose next turns are prepared at a time", "gateway")
READERS = Limit(64, "entries", "readers of one generation", "gateway", "RYZANSTEIN_MAX_READERS")
TENANT_GRAMMARS = Limit(16, "entries", "unknown grammars that wait to be compiled in a gateway", "tenant")
GRAMMAR_SECONDS = Limit(20, "seconds", "compiling of unknown grammars in a gateway within a minute", "tenant")
GRAMMARS_WAITING = Limit(64, "entries", "unknown grammars that wait to be compiled", "gateway")
TEMPLATES_WAITING = Limit(
    64 << 20,
    "bytes",
    "conversations for one model that wait for its chat template, a quarter for each tenant",
    "gateway",
)
TEXT_WAITING = Limit(64 << 20, "bytes", "texts that wait to be tokenized, a quarter for each tenant", "gateway")
LARGE_WAITING = Limit(
    256 << 20, "bytes", "requests of more than 64 KiB that wait to be decoded, a quarter for each tenant", "gateway"
)
TOKENIZED_SEGMENTS = Limit(
    8 << 20,
    "bytes",
    "tokens of parts of prompts that are kept for one tokenizer, so that what begins alike is tokenized once; 512 "
    "parts of less than 256 characters beside them",
    "gateway",
)
TOKENIZER_INFO = Limit(256 << 10, "bytes", "the answer of `/tokenizer_info`; larger fields are left out", "gateway")
TOKENIZERS = Limit(16, "entries", "tokenizers that are kept", "gateway")
WAITING = Limit(4096, "entries", "interactive requests for one model that wait", "scheduler", "RYZANSTEIN_MAX_WAITING")
HELD_REQUESTS = Limit(
    1024,
    "entries",
    "recovery and batch requests taken from the queue, of each lane",
    "scheduler",
    "RYZANSTEIN_HELD_REQUESTS",
)

HELD_BYTES = Limit(256 << 20, "bytes", "requests taken from the queue", "scheduler", "RYZANSTEIN_HELD_BYTES")
KNOWN_BEGINNINGS = Limit(1 << 16, "entries", "prompt prefixes for which the last group is remembered", "scheduler")
RECENT_FRAMES = Limit(
    8192, "entries", "recent frames kept for republication; older tokens are computed again", "executor"
)
RECENT_FRAME_BYTES = Limit(64 << 20, "bytes", "these frames together", "executor")

_CITED = re.compile(r"limit ([a-z_]+): ")


def limit_of(refusal: str) -> "Limit | None":
    """The bound for which something was refused, as `Limit.cited` has named it; None: it was for something else."""
    cited = _CITED.search(refusal)
    return _BY_NAME.get(cited[1]) if cited is not None else None


_BY_NAME = {name.lower(): limit for name, limit in list(globals().items()) if isinstance(limit, Limit)}
for _name, _limit in _BY_NAME.items():
    msgspec.structs.force_setattr(_limit, "name", _name)
# All of them.
LIMITS: tuple[Limit, ...] = tuple(_BY_NAME.values())

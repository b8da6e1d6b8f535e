"""What gateways keep and tell each other about generations: records, owners, keys, listeners.

As in `shared.messages`: fields are only ever added, at the end and with a default.
"""

from typing import Literal

import msgspec

from shared.messages.generations import FinishReason, GenerationRequest, TokenLogprobs


class ResponseRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a response of `/v1/responses` needs beside its tokens to be shown, kept and continued."""

    shown: bytes  # JSON object: the fields of the request that the response shows again
    items: bytes  # JSON array: the items of the request's own input
    previous: str = ""  # identity of the response that it continues; empty: none
    store: bool = True  # whether it is kept when its tokens have left the journal
    background: bool = False  # whether the request is answered before the response has ended
    conversation: str = ""  # the id of the conversation that it is added to; empty: none
    compacts: bool = False  # whether what the model says is a summary of the conversation, and no message
    # Whether its prompt is to be in the cache, and nothing is to be said: the one token is not shown.
    prewarm: bool = False


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a chat's text is taken apart into reasoning, content and tool calls."""

    tools: str = ""  # the parser of tool calls; empty: they are not looked for
    # The tools that may be called, by name: JSON types of their parameters, joined by `|`; "" if not known.
    types: dict[str, dict[str, str]] = {}
    single: bool = False  # only the first call counts (parallel_tool_calls false)
    # One function was demanded by its name: the answer ends with `stop`, not with `tool_calls`.
    named: bool = False
    legacy: bool = False  # asked for with `functions`: shown as `function_call`
    reasoning: str = ""  # the parser of reasoning; empty: it is not looked for
    opened: bool = False  # the prompt ends within the reasoning
    # Names of the custom tools: of their calls the text is shown that the model has put into JSON.
    custom: list[str] = []


class Scoring(msgspec.Struct, frozen=True, omit_defaults=True):
    """How scores are made of the vectors of a rerank, score or classify request."""

    # Of the logits of classes; of the log probabilities of the answers yes and no; of two texts' embeddings.
    way: Literal["classes", "answers", "vectors"]
    activation: str = ""  # of classes: `ModelCard.activation`, or what the client wants instead
    labels: list[str] = []  # of classes: `ModelCard.labels`, of a classify request
    # Of embeddings: the first so many prompts are queries, one for all documents or one for each.
    queries: int = 0
    top_n: int = 0  # documents that are shown, the best ones; 0: all


class GenerationRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that any gateway needs to serve a client's generation: its choices, and how its text is shown.

    Choice c of prompt p has the index p * choices + c, and its wire id is `<identity>-<index>`.
    """

    identity: str  # what the client knows, behind a prefix of its endpoint
    endpoint: str  # which API's answer it is. Any name: gateways with other dialects read it too
    created: float  # Unix seconds by the clock of the gateway that took it
    # Choice 0 of each prompt; the other choices differ from it in id and seed alone.
    requests: list[GenerationRequest]
    choices: int = 1  # choices of each prompt (n)
    # Prompts in all. A record that is too large for one message comes in several, each with some of them.
    prompts: int = 1
    first_prompt: int = 0  # number of the prompt in `requests[0]`
    stop: list[str] = []
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    # Seconds for which it goes on while nobody listens; 0: for the short grace of its gateway.
    background: float = 0.0
    # Key in the bucket `idempotency`, where there is one: freed when the generation fails.
    idempotency: str = ""
    tenant: str = ""  # whose it is: to others it is not there
    parsing: Parsing | None = None
    response: ResponseRecord | None = None  # of the endpoint `responses` alone
    # Choices of each prompt that are shown, those with the highest mean log probability first; 0: all, in order.
    best: int = 0
    # Whether log probabilities were computed to find the best choices and are not shown.
    hide_logprobs: bool = False
    echo: bool = False  # whether each choice's text begins with its prompt
    include_stop: bool = False  # whether what ends a text, a stop string or a stop token, is part of it
    # Whether a chat's answer goes on with the conversation's last message, in the middle of its text.
    continues: bool = False
    continuous_usage: bool = False
    obfuscate: bool = False  # whether chunks are padded, so that their lengths say nothing of the text
    fingerprint: str = ""  # of the model and its engine when the request was taken
    service_tier: str = ""  # the tier that served it, where the client asked for one
    store: bool = False
    metadata: dict[str, str] = {}
    dimensions: int = 0  # numbers of a vector that are shown; 0: all
    base64: bool = False  # whether vectors are shown in base64, and not as numbers
    user: str = ""  # whom the client does this for: its own word for an end user
    messages: bytes = b""  # the conversation as JSON, of a chat completion that is to be stored
    # Log probabilities of the prompts that are shown in a list of their own: -1: none; 0: of their tokens; k: also of
    # the k most likely ones.
    prompt_logprobs: int = -1
    log_behind: int = -1  # number in the journal behind which all of its log stands; -1: not told
    # Parts in which the record lies in the bucket `records`, being large: here is no more than its outline then,
    # without `requests`; 0: it is here.
    aside: int = 0
    # Of a record that lies there: its first request without prompt, sampling and grammar.
    outline: GenerationRequest | None = None
    prompt_tokens: int = 0  # of a record that lies there: tokens of all its prompts
    # Whether log probabilities name tokens by their ids (`token_id:17`) and not by their text.
    tokens_as_ids: bool = False
    # Whether the ids of the prompts' tokens and of the outputs' are shown beside the text.
    token_ids: bool = False
    # The client's own stop token ids, without the model's end of sequence: the one that ends a text is told.
    stop_token_ids: list[int] = []
    # Name of the LoRA adapter that its client has asked for; its digest stands in the requests.
    adapter: str = ""
    capped: bool = False  # whether its client has asked for more tokens than the context had room for
    # Of the endpoints `rerank`, `score` and `classify`, and of `pooling` where the model classifies.
    scoring: Scoring | None = None
    texts: list[str] = []  # of each of `requests`: the text that is shown with its score; empty: none is

    # Whether chunks tell how much of the prompts is computed, while there is nothing else to tell.
    return_progress: bool = False
    # Whether the answer to an HTTP request is its vectors' bytes; with `bytes`, a header tells where each lies. What
    # reads it otherwise gets `base64`, which goes with it.
    octets: Literal["", "bytes", "bytes_only"] = ""

    @property
    def model_shown(self) -> str:
        """What answers call the model: the adapter's name, else the model's."""
        return self.adapter or self.requests[0].model

    @property
    def outlives(self) -> bool:
        """Whether its answer is kept when the journal has dropped its tokens."""
        return self.response.store if self.response is not None else self.is_stored_chat

    @property
    def is_stored_chat(self) -> bool:
        return self.store and self.endpoint == "chat.completions"


class GenerationRecords(msgspec.Struct, frozen=True):
    """The records of one turn of a gateway's event loop."""

    records: list[GenerationRecord]


class Ownership(msgspec.Struct, frozen=True):
    """Who looks after a generation whose first gateway is lost, in the KV bucket `generations`; changed by
    compare-and-set. A generation without an entry is its first gateway's."""

    owner: str  # the gateway's instance
    consumers: list[str]  # whose token subjects have parts of the log, in order; the owner's is the last


class Unfinished(msgspec.Struct, frozen=True):
    """A gateway's generations that take long, in the KV bucket `unfinished`: what others would inherit."""

    at: float  # Unix seconds; what began shortly before or later is found among the records alone
    identities: list[str]


class Inheritance(msgspec.Struct, frozen=True):
    """Which gateway looks through what a lost one left, in the KV bucket `inheritances`; by compare-and-set."""

    heir: str
    lost_at: float  # Unix seconds, as the record of the lost gateway has them: one life is inherited once
    done: bool = False


class Idempotency(msgspec.Struct, frozen=True):
    """The generation of an idempotency key, in the KV bucket `idempotency`; created by compare-and-set."""

    identity: str
    fingerprint: str  # of the request's body: another body under the same key is a mistake of the client
    created: float  # Unix seconds


class ConversationTurn(msgspec.Struct, frozen=True):
    """Items that came into a conversation together."""

    name: str  # the response that has brought them, or any other
    ids: list[str]  # of those that have not been deleted
    size: int  # bytes of all, as JSON


class ConversationEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A conversation, or the items of one of its turns, in the KV bucket `conversations`."""

    created_at: float  # Unix seconds
    metadata: dict[str, str] = {}
    turns: list[ConversationTurn] = []  # in order; of the conversation itself
    begun: dict[str, float] = {}  # Responses that may add a turn, and the Unix seconds at which they began
    items: bytes = b""  # of a turn: a JSON array, deflated


class ResponsePart(msgspec.Struct, frozen=True):
    """A kept response, or a part of a large one, in the KV bucket `responses`."""

    data: bytes  # of a `StoredResponse`: MessagePack, deflated
    parts: int  # in all, this one counted; 0: the response has been deleted
    kept_at: float  # Unix seconds
    size: int = 0  # of the first part: bytes of all, inflated; 0: written by a version that did not say


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response that has ended: its record, and the log that the journal forgets sooner."""

    record: GenerationRecord  # its prompts have their length alone
    tokens: list[int]
    response: bytes  # the response as JSON
    finish: FinishReason = ""
    scores: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    error_code: str = ""
    error: str = ""


class StoredChat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What lists of stored chat completions look at; the answer itself is a `StoredResponse`."""

    identity: str
    id: str  # what the client knows
    tenant: str
    model: str
    created_at: float  # Unix seconds
    metadata: dict[str, str] = {}


class Listen(msgspec.Struct, frozen=True, tag="listen"):
    """Somebody at `listener` reads these generations of yours. Repeated while it is so."""

    listener: str
    identities: list[str]


class Listened(msgspec.Struct, frozen=True):
    """The answer to `Listen`."""

    held: list[str]  # those that the gateway looks after. The others have ended, or belong to nobody it knows


class Spent(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was granted of a limit lately, in the KV bucket `limits`; changed by compare-and-set."""

    newest: int = 0  # Unix second of the last slot
    slots: list[int] = []  # what was granted in each second, the oldest first


class InUse(msgspec.Struct, frozen=True):
    """How many generations each key and tenant has at one gateway; told to all when it changes, and every second."""

    gateway: str
    counts: dict[str, int]

"""The gateway's settings."""

from pathlib import Path

from platformdirs import user_cache_path
from pydantic import Field

from shared.config import CommonSettings


class GatewaySettings(CommonSettings):
    """OpenAI-compatible edge: REST, SSE, WebSocket and gRPC."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the API and of /health, /ready and /metrics; 0: the system chooses."""
    share_port: bool = False
    """Whether other gateways of this user on this host listen on `port` and `grpc_port` too: the system divides
    connections among them (SO_REUSEPORT, Linux). Each answers /health, /ready and /metrics on its own `ops_port` as
    well, with the same TLS."""
    tls_certificate: str = ""
    """PEM file of the API's certificate chain; with `tls_key`. Both files may be replaced while the gateway runs."""
    tls_key: str = ""
    """PEM file of its private key, without a password."""
    tls_client_ca: str = ""
    """PEM file of the authorities that must have signed every client's certificate (mutual TLS); empty: none needed."""
    tls_check_interval: float = Field(default=5.0, gt=0)
    """Seconds between checks for a replaced certificate or key."""
    body_limit: int = Field(default=4 << 20, gt=0)
    """Largest request body or WebSocket message, in bytes."""
    generation_bytes: int = Field(default=16 << 20, gt=0)
    """Bytes that the generations of one request may put into the queue together: each choice carries the whole
    prompt."""
    history_bytes: int = Field(default=16 << 20, gt=0)
    """Bytes of stored items, decompressed, that one request may have of earlier responses and conversations; an item
    that it refers to twice counts twice. Pages of lists end before they have more."""
    history_held_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of these items that requests hold at a time while they are prepared, a quarter for each tenant; beyond it
    429."""
    body_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a client gets to send a request body."""
    prompt_limit: int = Field(default=0, ge=0)
    """Most tokens of a prompt; 0: the model's context length."""
    special_tokens_in_messages: bool = False
    """Whether the text of a special token inside a message is tokenized as that token. Off: it is plain text, so
    that no message can imitate a chat turn of another role."""
    request_timeout: float = Field(default=0.0, ge=0)
    """Seconds after which a generation is ended, however far it has come; 0: never. Batch jobs have their own
    limit."""
    token_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for the first token, and for each next one."""
    cold_requests: int = Field(default=1024, ge=0)
    """Requests held for models that were never loaded, until they are; beyond them 429."""
    cold_model_requests: int = Field(default=256, ge=0)
    """The same for each model."""
    cold_bytes: int = Field(default=256 << 20, ge=0)
    """Bytes of those requests."""
    cold_model_bytes: int = Field(default=64 << 20, ge=0)
    """The same for each model."""
    manage_models: bool = True
    """Whether models may be registered, loaded, unloaded and removed over the API, by keys with that right
    (`ryzanstein keys create --manage-models`) or, while no key exists, by everybody. Off: by the command line alone."""
    model_directories: str = ""
    """Directories on the executors' hosts, separated by commas or colons, below which a model registered over the API
    may lie, beside the model cache; hub names and built-in names need none."""
    model_cache: Path = Field(default_factory=lambda: user_cache_path("ryzanstein") / "models")
    """Where executors keep models: a model that is registered over the API may lie below it."""
    stall_timeout: float = Field(default=10.0, gt=0)
    """Seconds without a token after which the journal is read for a frame that was missed."""
    max_generations: int = Field(default=4096, gt=0)
    """Generations in flight; beyond them requests are refused with 429."""
    max_tenant_generations: int = Field(default=2048, gt=0)
    """Of these, generations of one tenant; beyond them its requests are refused with 429. Less than
    `RYZANSTEIN_MAX_GENERATIONS`, so that one leaves places to others. While there are no keys it bounds nothing."""
    max_generations_per_socket: int = Field(default=256, gt=0)
    """Generations in flight on one WebSocket connection."""
    max_readers: int = Field(default=64, gt=0)
    """Connections that may read one generation here at the same time."""
    resume_grace: float = Field(default=5.0, ge=0)
    """Seconds for which a stream continues after its client has disconnected, so that it can be resumed; then it is
    cancelled."""
    background_limit: float = Field(default=3600.0, ge=0)
    """Longest time, in seconds, for which a request may ask that its generation continues without a connected
    client."""
    idempotency_ttl: float = Field(default=3600.0, gt=0)
    """Seconds for which an idempotency key is remembered; the journal should keep frames as long."""
    records_max_bytes: int = Field(default=512 << 20, gt=0)
    """Bytes of all requests that are stored beside the journal, since they are 32 KiB or larger."""
    tenant_record_bytes: int = Field(default=128 << 20, gt=0)
    """Bytes of one tenant's requests beside the journal; beyond them its own oldest are deleted, and can no longer
    be resumed."""
    response_ttl: float = Field(default=2_592_000.0, gt=0)
    """Seconds for which a response of /v1/responses is kept after it has ended or was last continued."""
    response_max_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of stored responses, compressed; beyond them the oldest are deleted."""
    tenant_response_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes of one tenant's stored responses and chat completions, compressed; beyond them its own oldest are
    deleted."""
    tenant_responses: int = Field(default=10_000, gt=0)
    """Stored responses of one tenant, and as many stored chat completions; beyond them its own oldest are
    deleted."""
    default_max_tokens: int = Field(default=0, ge=0)
    """`max_tokens` of a chat completion that names none; 0: what is left of the context."""
    recovery_attempts: int = Field(default=3, ge=0)
    """Times that a request is retried on another ring after its group was lost. Drained groups do not count."""
    drain_delay: float = Field(default=0.0, ge=0)
    """Seconds for which a stopping gateway keeps accepting requests while /ready already answers 503: as long as
    a load balancer takes to notice."""
    drain_timeout: float = Field(default=20.0, ge=0)
    """Seconds that running streams get to end when the gateway stops; then other gateways take them over."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Requests that each API key may begin within any minute, at all gateways together; 0: unlimited. A key may
    have a limit of its own. While there are no keys the limit counts all requests together."""
    tokens_per_minute: int = Field(default=0, ge=0)
    """As `requests_per_minute`, for prompt and output tokens."""
    concurrent_generations: int = Field(default=0, ge=0)
    """Requests that each API key may have in flight; 0: unlimited."""
    tenant_requests_per_minute: int = Field(default=0, ge=0)
    """As `requests_per_minute`, for all keys of a tenant together."""
    tenant_tokens_per_minute: int = Field(default=0, ge=0)
    """As `tokens_per_minute`, for all keys of a tenant together."""
    tenant_concurrent_generations: int = Field(default=0, ge=0)
    """As `concurrent_generations`, for all keys of a tenant together."""
    allowed_hosts: str = ""
    """Host names, separated by commas, under which clients may address the gateway beside its own address; `*`:
    any. Compared with the Host header while no API key exists (against DNS rebinding); with keys only where this is
    set."""
    allowed_origins: str = ""
    """Origins (https://chat.example), separated by commas, whose web pages may call the API (CORS); `*`: any."""
    prefill_ahead: bool = True
    """Whether `POST /v1/sessions/{id}/prefill` computes a conversation before its next turn comes."""
    strict_fields: bool = False
    """Refuse request fields that have no effect here, instead of naming them in the header
    `x-ryzanstein-ignored-fields`."""
    close_objects: bool = True
    """Whether objects of a JSON Schema without `additionalProperties` have the properties that are named and no others,
    in structured output and in the arguments of tools. Off: any others too, as JSON Schema has it. A request's own
    `close_objects` comes first."""
    require_key: bool = False
    """Require an API key even before the first one exists. Once there is one, it is always required."""
    metrics_need_key: bool = False
    """Whether /metrics requires an API key as well, once one exists."""
    isolate_tenant_cache: bool = False
    """Whether the prefix cache is separate for each tenant: no tenant can then tell from timing what others have
    sent, and prefixes that tenants have in common are computed and kept once for each."""
    file_limit: int = Field(default=512 << 20, gt=0)
    """Largest file that may be uploaded, in bytes."""
    files_max_bytes: int = Field(default=4 << 30, ge=0)
    """Bytes of all files together; 0: as many as NATS has. Read when the object store is created."""
    tenant_file_bytes: int = Field(default=1 << 30, gt=0)
    """Bytes of all uploaded files of a tenant together; outputs of batches may take as many again."""
    tenant_files: int = Field(default=10_000, gt=0)
    """Files of a tenant; beyond them uploads are refused."""
    pending_frames: int = Field(default=65_536, gt=0)
    """Token frames that may be queued for reading; beyond them frames are dropped, and read from the journal."""
    max_connections: int = Field(default=10_000, gt=0)
    """Connections at the same time (REST, WebSocket and gRPC together, TLS handshakes included), and never more
    than the process may open files; beyond them requests get 503, gRPC calls UNAVAILABLE."""
    head_timeout: float = Field(default=10.0, gt=0)
    """Seconds that a client gets for its TLS handshake, and to send a request's line and headers."""
    head_limit: int = Field(default=65_536, ge=1024)
    """Largest request line and headers together, in bytes."""
    owed_limit: int = Field(default=512 << 20, gt=0)
    """Bytes of answers that clients of all connections together have not read; beyond them those connections are closed
    that were left most."""
    arriving_limit: int = Field(default=256 << 20, gt=0)
    """Bytes of request bodies and messages of all connections together that have not come whole; beyond them the
    connections with the most are closed."""
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the gRPC API; 0: the system chooses. Unset: gRPC is not served."""
    grpc_keepalive: float = Field(default=60.0, gt=0)
    """Seconds of silence after which a gRPC client is pinged; it has a third as long to answer. A connection also
    ends once its client has left answers unread, or has had no admitted call, for this long."""

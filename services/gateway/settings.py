"""The gateway's settings."""

from pydantic import Field

from services.gateway.life.decisions import Limits
from shared.config import CommonSettings


def limits_of(settings: "GatewaySettings") -> Limits:
    """The bounds of every generation's life."""
    return Limits(
        settings.recovery_attempts, settings.token_timeout, settings.stall_timeout, settings.request_timeout
    )


class GatewaySettings(CommonSettings):
    """OpenAI-compatible edge: REST, SSE, WebSocket and gRPC."""

    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the API and of /health, /ready and /metrics; 0: the system chooses."""
    tls_certificate: str = ""
    """File of the certificate chain (PEM) of the API; with `tls_key`. Both may be replaced while it runs."""
    tls_key: str = ""
    """File of its key (PEM, without a password)."""
    tls_client_ca: str = ""
    """File of the authorities of which every client must bring a certificate; empty: clients need none."""
    tls_check_interval: float = Field(default=5.0, gt=0)
    """Seconds between two looks whether certificate and key were replaced."""
    body_limit: int = Field(default=4 << 20, gt=0)
    """Largest request body or WebSocket message, in bytes."""
    generation_bytes: int = Field(default=16 << 20, gt=0)
    """Bytes that the generations of one request may send to the queue together: each choice has the whole prompt."""
    body_timeout: float = Field(default=30.0, gt=0)
    """Seconds that a client gets to send a request body."""
    prompt_limit: int = Field(default=0, ge=0)
    """Tokens that a prompt may have; 0: what the model's context takes."""
    special_tokens_in_messages: bool = False
    """Whether the text of a special token in a message is that token, as the model's own template writes it; otherwise
    it is the text that it is, and a message cannot pretend to be another one."""
    request_timeout: float = Field(default=0.0, ge=0)
    """Seconds after which a generation is ended, however far it has come; 0: never. Batch jobs have their own."""
    token_timeout: float = Field(default=600.0, gt=0)
    """Seconds to wait for the first token, and for each next one."""
    stall_timeout: float = Field(default=10.0, gt=0)
    """Seconds without a token after which the journal is read for one that was missed."""
    max_generations: int = Field(default=4096, gt=0)
    """Generations in flight; beyond them requests are refused with 429."""
    max_generations_per_socket: int = Field(default=256, gt=0)
    """Generations in flight on one WebSocket connection."""
    max_readers: int = Field(default=64, gt=0)
    """Connections that may read one generation here at the same time."""
    resume_grace: float = Field(default=5.0, ge=0)
    """Seconds that a stream goes on after its client has gone, so that it can come back; then it is cancelled."""
    background_limit: float = Field(default=3600.0, ge=0)
    """Longest time that a request may ask its generation to go on while nobody listens, in seconds."""
    idempotency_ttl: float = Field(default=3600.0, gt=0)
    """Seconds that an idempotency key is known; the journal should keep as long."""
    records_max_bytes: int = Field(default=512 << 20, gt=0)
    """Bytes of requests that are too large for the journal and lie beside it, of all tenants together."""
    tenant_record_bytes: int = Field(default=128 << 20, gt=0)
    """Bytes of a tenant's requests beside the journal; beyond them its own oldest make room, and cannot be resumed."""
    response_ttl: float = Field(default=2_592_000.0, gt=0)
    """Seconds that a response of /v1/responses is kept after it has ended or was continued last."""
    response_max_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of kept responses, deflated; beyond them the oldest make room."""
    tenant_response_bytes: int = Field(default=64 << 20, gt=0)
    """Bytes of a tenant's kept responses and stored chat completions, deflated; beyond them its own oldest make
    room."""
    tenant_responses: int = Field(default=10_000, gt=0)
    """Kept responses of a tenant, and as many stored chat completions in lists; beyond them its own oldest make
    room."""
    default_max_tokens: int = Field(default=0, ge=0)
    """Output tokens of a chat completion that names no limit; 0: what is left of the context."""
    recovery_attempts: int = Field(default=3, ge=0)
    """Times that a request is handed in again after its group was lost."""
    drain_delay: float = Field(default=0.0, ge=0)
    """Seconds that the gateway goes on taking requests once it is told to stop and says that it is not ready:
    as long as a load balancer takes to notice."""
    drain_timeout: float = Field(default=20.0, ge=0)
    """Seconds that running streams get to end when the gateway stops; then others take them over."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Requests that each API key may begin within any minute, at all gateways together; 0: any number. A key
    may have a limit of its own; without keys it holds for all requests together."""
    tokens_per_minute: int = Field(default=0, ge=0)
    """As `requests_per_minute`, for tokens of prompt and output."""
    concurrent_generations: int = Field(default=0, ge=0)
    """Requests that each API key may have under way; 0: any number."""
    tenant_requests_per_minute: int = Field(default=0, ge=0)
    """As `requests_per_minute`, for all keys of a tenant together."""
    tenant_tokens_per_minute: int = Field(default=0, ge=0)
    tenant_concurrent_generations: int = Field(default=0, ge=0)
    allowed_hosts: str = ""
    """Names by which clients may ask for the gateway beside its own address, with commas; `*`: any. While no API key
    exists the Host header must be one of them, or the address; with keys only where this is set."""
    allowed_origins: str = ""
    """Origins (https://chat.example) whose web pages may use the gateway, with commas; `*`: any page."""
    strict_fields: bool = False
    """Refuse fields of requests that change nothing here, instead of naming them in `x-ryzanstein-ignored-fields`."""
    require_key: bool = False
    """Ask for an API key also before the first one exists; once there is one, it is always asked for."""
    metrics_need_key: bool = False
    """Whether /metrics needs an API key as well, once one exists."""
    isolate_tenant_cache: bool = False
    """Whether each tenant has KV blocks of its own: others' prompts can then not be told by what is cached, and a
    beginning that tenants have in common is computed, and kept, once for each."""
    file_limit: int = Field(default=512 << 20, gt=0)
    """Largest file that may be uploaded, in bytes."""
    files_max_bytes: int = Field(default=4 << 30, ge=0)
    """Bytes of all files together; 0: as many as NATS has. It counts when the object store is created."""
    tenant_file_bytes: int = Field(default=1 << 30, gt=0)
    """Bytes of all files of a tenant together; outputs of batches may be as many again."""
    tenant_files: int = Field(default=10_000, gt=0)
    """Files of a tenant, beyond which it uploads no more."""
    batch_requests: int = Field(default=200_000, gt=0)
    """Most lines of a batch."""
    batch_window_limit: float = Field(default=604_800.0, gt=0)
    """Longest completion window of a batch, in seconds."""
    tenant_batches: int = Field(default=200, gt=0)
    """Batches of a tenant that are not over, beyond which it submits no more."""
    batch_jobs: int = Field(default=8, ge=0)
    """Batches that this gateway runs at a time; 0: it leaves them to others."""
    batch_parallelism: int = Field(default=256, gt=0)
    """Most lines of batches that this gateway has under way; it has no more than the groups have places for."""
    pending_frames: int = Field(default=65_536, gt=0)
    """Token frames that may wait to be read; when there are more, the journal fills the gap."""
    max_connections: int = Field(default=10_000, gt=0)
    """Connections at the same time, of REST, WebSockets and gRPC together, those in a TLS handshake too, and no more
    than the process may open files; beyond them requests are refused with 503, calls with UNAVAILABLE."""
    head_timeout: float = Field(default=10.0, gt=0)
    """Seconds that a client gets for its TLS handshake, and to send a request's line and headers."""
    head_limit: int = Field(default=65_536, ge=1024)
    """Largest request line and headers together, in bytes."""
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the gRPC API; 0: the system chooses. Left out: it is not served."""
    grpc_keepalive: float = Field(default=60.0, gt=0)
    """Seconds of silence after which a gRPC client is asked whether it is there; it has a third as long to answer. As
    long a client may leave answers unread, or have no call that was let in; then its connection ends."""

"""What clients saw. Only they write it; promises read it, during the run and after it. Times are virtual seconds."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

# `refused`: for good, with an error that says that it makes no sense to try again. `left`: its client has gone.
Outcome = Literal["open", "answered", "refused", "cancelled", "left"]
Ending = Literal["lost", "refused", "ended", "left"]
Kept = Literal["file", "batch", "job", "model", "response", "chat", "conversation", "adapter"]


@dataclass(eq=False)
class Wanted:
    """What the only right answer to a request is."""

    text: str | None  # None: its seed is drawn by the gateway, and stands in the generation's record
    tokens: int  # -1: not known
    finish: str = "length"
    logprobs: bool = False  # whether they were asked for
    refusal: str = ""  # the code of the error that is the only right answer; empty: there is another one


@dataclass(eq=False)
class Try:
    """One time that a client asked a gateway for a request's answer, or for the rest of it."""

    at: float
    gateway: str
    resumes: bool = False
    until: float = -1.0
    ending: Ending | None = None
    status: int = 0
    code: str = ""  # of the error, where it was refused
    # Whether it was refused with a key that its client had meanwhile changed for another.
    replaced: bool = False


@dataclass(eq=False)
class Request:
    """One request of one client, however often it was sent."""

    client: str
    kind: str  # of the client: chat, websocket, keyed ...
    number: int  # of the client's requests
    body: dict[str, Any]
    wanted: Wanted
    started: float
    tenant: str = ""
    key: str = ""  # its idempotency key; empty: none
    identity: str = ""  # as its answer names it
    text: str = ""
    position: Any = ""  # where its reader stands: the last event's id, or a position
    logprobs: list[Any] = field(default_factory=list)  # of each token: the API's objects
    usage: dict[str, Any] | None = None
    finish: str = ""
    arrivals: int = 0  # pieces of text
    last_arrival: float = -1.0
    tries: list[Try] = field(default_factory=list)
    ended: float = -1.0
    outcome: Outcome = "open"
    # What its client found wrong: an event that does not belong there, an answer that is none.
    fault: str = ""
    # All that it was ever called, where it came under one idempotency key.
    identities: set[str] = field(default_factory=set)
    cancel_asked: bool = False

    @property
    def name(self) -> str:
        """As sentences call it."""
        shown = f" ({self.identity})" if self.identity else ""
        return f"request {self.number} of {self.client}{shown}"

    def begin_again(self) -> None:
        """It is sent once more, from its beginning."""
        self.text, self.position, self.finish, self.usage, self.logprobs = "", "", "", None, []
        if not self.key:
            self.identity = ""

    def arrived(self, text: str, now: float) -> None:
        self.text += text
        self.arrivals += 1
        self.last_arrival = now

    def called(self, identity: str) -> None:
        self.identity = identity
        self.identities.add(identity)


@dataclass(eq=False)
class Acknowledged:
    """Something that the API has said to be there, or to be gone."""

    what: Kept
    identity: str
    at: float
    tenant: str
    token: str
    gateway: str
    gone_at: float = -1.0  # when the API has said that it is gone; -1: it is not
    found: int = 0  # the status with which a look at the end was answered; 0: nobody has looked


@dataclass(eq=False)
class BatchSeen:
    client: str
    identity: str
    tenant: str
    wanted: dict[str, str]  # text of each line's answer by its custom_id
    started: float = 0.0
    ended: float = -1.0
    status: str = ""
    statuses: list[str] = field(default_factory=list)  # one after the other, as they were seen
    counts: dict[str, int] = field(default_factory=dict)
    output: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    cancel_asked: bool = False
    ends: tuple[str, ...] = ("completed",)  # how it may end, unless it is cancelled
    fatal: str = ""  # the custom_id of a line that ends every gateway that computes it; empty: there is none


@dataclass(eq=False)
class JobSeen:
    """A fine-tuning job."""

    client: str
    identity: str
    tenant: str
    seed: int
    # Says what its examples are: jobs that have the same, and the same seed, have the same adapter.
    examples: int
    started: float = 0.0
    ended: float = -1.0
    status: str = ""
    statuses: list[str] = field(default_factory=list)
    model: str = ""  # the fine-tuned one
    results: list[str] = field(default_factory=list)  # result files
    digest: str = ""  # of its adapter
    wanted_digest: str = ""  # as of the undisturbed job; empty: not known
    events: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # of its step events, in order
    cancel_asked: bool = False
    # All adapters at the end that say that the job has made them.
    names_of_adapters: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Filled:
    """That a tenant has filled a quota."""

    client: str
    tenant: str
    what: Literal["files", "jobs"]
    most: int  # that it may have
    since: float
    made: int = 0  # beside what others of the tenant had made
    refused: bool = False


@dataclass(eq=False)
class KeySeen:
    """An API key that was revoked during the run."""

    identity: str
    revoked_at: float
    tenant: str
    # When requests that were sent after that were taken all the same, and by which gateway.
    accepted: list[tuple[float, str]] = field(default_factory=list)
    refused: list[tuple[float, str]] = field(default_factory=list)


class History:
    """Observers are told of a request each time that its client has seen something of it."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.acknowledged: list[Acknowledged] = []
        self.batches: list[BatchSeen] = []
        self.jobs: list[JobSeen] = []
        self.keys: list[KeySeen] = []
        self.filled: list[Filled] = []
        # When which tenant was refused for what it keeps, and in which words.
        self.quotas: list[tuple[float, str, str]] = []
        self.poisoned: Counter[str] = Counter()  # gateways that a line has ended, by its batch
        self.faults: list[tuple[float, str]] = []  # what clients of other things than requests found wrong
        self.observers: list[Callable[[Request], None]] = []

    def began(self, request: Request) -> Request:
        self.requests.append(request)
        return request

    def saw(self, request: Request) -> None:
        for observer in self.observers:
            observer(request)

    def ended(self, request: Request, outcome: Outcome, now: float) -> None:
        request.outcome, request.ended = outcome, now
        self.saw(request)

    def open(self) -> Iterator[Request]:
        """Those that have not ended."""
        return (request for request in self.requests if request.outcome == "open")

    @property
    def unsettled(self) -> list[str]:
        """What clients still wait for, in words."""
        return [
            *(f"{one.name} [{one.kind}]" for one in self.open()),
            *(f"batch {one.identity} ({one.status})" for one in self.batches if one.ended < 0),
            *(f"job {one.identity} ({one.status})" for one in self.jobs if one.ended < 0),
        ]

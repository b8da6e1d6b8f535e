"""Every error that crosses a service boundary, in one tree.

    RyzansteinError
    ├── InvalidRequest            the client must change the request
    │   ├── UnknownModel
    │   ├── ModelDoesNotFit       no host can take it beside what is pinned
    │   ├── ContextLengthExceeded
    │   ├── InvalidGrammar
    │   ├── FatalRequest          two rings have died of computing it
    │   ├── TrainingDiverged      a fine-tuning job's loss is no number
    │   └── PayloadTooLarge
    ├── Unavailable               the same request may succeed later (retryable)
    │   ├── QueueFull
    │   ├── NoGroupAvailable
    │   ├── DeadlineExceeded
    │   ├── StorageFull
    │   ├── BrokerUnavailable
    │   │   ├── NobodyThere
    │   │   └── LinkLost
    │   └── RingLost
    ├── ConfigurationError        the operator must change a setting
    │   ├── PortInUse
    │   └── ModelLoadError
    └── InternalError             a fault of ours

`code` is stable and travels on the wire; `retryable` says whether the very same request may be
handed in again. Messages are one sentence: what is wrong, where, and what to do.
"""

from typing import ClassVar


class RyzansteinError(Exception):
    """Root of the tree. `str(error)` is the sentence for the user."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param  # the field of the request that is at fault, where there is one
        self.retry_after = retry_after  # seconds after which a retry makes sense, where that is known


class InvalidRequest(RyzansteinError):
    code = "invalid_request"


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class ModelDoesNotFit(InvalidRequest):
    """No host has the memory for it, or what is pinned leaves none: somebody has to make room."""

    code = "model_does_not_fit"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidGrammar(InvalidRequest):
    """What the output's text must match does not compile, or can be followed no further."""

    code = "invalid_grammar"

    def __init__(self, message: str, *, param: str | None = "response_format", retry_after: float | None = None):
        super().__init__(message, param=param, retry_after=retry_after)


class FatalRequest(InvalidRequest):
    """Rings die of computing it: handing it in again would end another one."""

    code = "fatal_request"


class TrainingDiverged(InvalidRequest):
    """The loss of a fine-tuning job, or the norm of its gradients, is no number: it would be again."""

    code = "training_diverged"


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"


class Unavailable(RyzansteinError):
    code = "unavailable"
    retryable = True


class QueueFull(Unavailable):
    code = "queue_full"


class NoGroupAvailable(Unavailable):
    code = "no_group_available"


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class StorageFull(Unavailable):
    code = "storage_full"


class BrokerUnavailable(Unavailable):
    code = "broker_unavailable"


class BrokerFull(BrokerUnavailable):
    """NATS has no disk space or memory left, or none that it may use. Told apart inside a service only."""


class NobodyThere(BrokerUnavailable):
    """NATS answers that nobody has subscribed to the subject: whoever was asked is not alive.
    Told apart inside a service only, so it has no code of its own."""


class LinkLost(BrokerUnavailable):
    """The connection to NATS broke before the answer came: whether NATS has done what was asked is not known.
    Told apart inside a service only."""


class RingLost(Unavailable):
    code = "ring_lost"


class ConfigurationError(RyzansteinError):
    code = "configuration_error"


class PortInUse(ConfigurationError):
    code = "port_in_use"


class ModelLoadError(ConfigurationError):
    code = "model_load_error"


class ModelNotStored(ConfigurationError):
    """A host has no files of the model; another may."""

    code = "model_not_stored"


class InternalError(RyzansteinError):
    code = "internal_error"


def error_from_code(code: str, message: str) -> RyzansteinError:
    """The error that was sent over the wire as `code`; an unknown code becomes an `InternalError`."""
    return _BY_CODE.get(code, InternalError)(message)


def reason_of(error: BaseException) -> str:
    """What a library's `error` says in its first line, for a sentence of ours, and in the next where that one only
    announces it; its kind where it is mute."""
    if isinstance(error, KeyError):  # which says what was looked up, and no more
        return f"it does not know {error}"
    lines = [line.strip() for line in str(error).strip().splitlines()]
    announced = bool(lines) and lines[0].endswith(":")
    return " ".join(lines[: 2 if announced else 1]).rstrip(".") or type(error).__name__


def _tree(root: type[RyzansteinError]) -> list[type[RyzansteinError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


_BY_CODE = {kind.code: kind for kind in reversed(_tree(RyzansteinError))}

"""Every subject, stream, bucket and store name. Nothing else in the code spells one out.

How a session is named in the KV bucket `sessions`.
"""

import functools
import hashlib
import re

from shared.messages import Lane

INTAKE_STREAM = "INTAKE"
JOURNAL_STREAM = "JOURNAL"
BATCHES_STREAM = "BATCHES"

GROUPS_BUCKET = "groups"
SERVICES_BUCKET = "services"
MODELS_BUCKET = "models"
SESSIONS_BUCKET = "sessions"
GENERATIONS_BUCKET = "generations"
UNFINISHED_BUCKET = "unfinished"
INHERITANCES_BUCKET = "inheritances"
IDEMPOTENCY_BUCKET = "idempotency"
KEYS_BUCKET = "api_keys"
OLD_KEYS_BUCKET = "keys"  # where older releases kept them, beside everything else
LIMITS_BUCKET = "limits"
RECORDS_BUCKET = "records"
RESPONSES_BUCKET = "responses"
CHATS_BUCKET = "chats"
CONVERSATIONS_BUCKET = "conversations"
BATCHES_BUCKET = "batches"
FILES_BUCKET = "files"
REGISTRY_BUCKET = "registry"
ADAPTERS_BUCKET = "adapters"
ADAPTER_FILES_BUCKET = "adapter_files"
HOSTS_BUCKET = "hosts"
LEASES_BUCKET = "leases"
PLACEMENTS_BUCKET = "placements"
TRAINING_BUCKET = "training_jobs"
TRAINING_EVENTS_BUCKET = "training_events"
TOKENIZERS_STORE = "tokenizers"
FILES_STORE = "files"
ADAPTERS_STORE = "adapters"
TRAINING_STORE = "training"

ALL_INTAKE = "intake.>"
ALL_TOKENS = "tokens.*"
ALL_RECORDS = "records.*.*"
ALL_BATCH_RESULTS = "batches.results.*"
ALL_BEATS = "health.beats.>"
HEALTH_EVENTS = "health.events"
CANCEL = "generations.cancel"
IN_USE = "limits.in_use"
CONNECTION_OPENED = "health.connections.opened"
# The broker's own news (JSON), where its configuration passes them on: see docs/operations.md.
CONNECTION_CLOSED = "health.connections.closed"
MODEL_DEMAND = "models.demand"
SCHEDULER_DEMAND = "models.waiting"
BATCH_SUBMIT = "batches.submit"
BATCH_STATUS = "batches.status"
BATCH_CANCEL = "batches.cancel"
BATCH_LIST = "batches.list"
BATCH_QUEUE = "gateways"  # queue group of the gateways: one of them answers
LEADER = "rank-0"  # the part of an executor that talks to the broker beside its supervisor

_SAFE = re.compile(r"[A-Za-z0-9_-]")


@functools.lru_cache(maxsize=4096)
def escape(name: str) -> str:
    """`name` as one subject token and KV key: letters, digits, `-` and `_` stay, the rest becomes `=XX`.

    Reversible, and different names stay different: `org/model.v1` → `org=2Fmodel=2Ev1`.
    """
    if not name:
        raise ValueError("an empty name cannot be part of a subject")
    return "".join(
        char if _SAFE.fullmatch(char) else "".join(f"={byte:02X}" for byte in char.encode()) for char in name
    )


def unescape(token: str) -> str:
    """The name that `escape` made `token` of."""
    return re.sub(rb"=([0-9A-F]{2})", lambda match: bytes([int(match[1], 16)]), token.encode()).decode()


def intake(lane: Lane, model: str) -> str:
    return f"intake.{lane}.{escape(model)}"


def intake_lane(lane: Lane) -> str:
    """Every model's intake of one lane."""
    return f"intake.{lane}.*"


def dispatch(group: str) -> str:
    return f"groups.{escape(group)}.dispatch"


def control(group: str) -> str:
    return f"groups.{escape(group)}.control"


def host_control(instance: str) -> str:
    """Where an executor is told to load and unload models."""
    return f"hosts.{escape(instance)}.control"


def debug(group: str) -> str:
    """Where an executor's supervisor answers whoever looks into its ring."""
    return f"groups.{escape(group)}.debug"


def handover(group: str) -> str:
    """Where leaders of other groups offer KV blocks."""
    return f"groups.{escape(group)}.handover"


def tokens(consumer: str) -> str:
    return f"tokens.{escape(consumer)}"


def records(writer: str, slot: str) -> str:
    """Records of generations. `writer`: a gateway's short name; `slot`: the second of their beginning, or *."""
    return f"records.{writer}.{slot}"


def gateway(consumer: str) -> str:
    """Where other gateways ask the gateway of that name."""
    return f"gateways.{escape(consumer)}"


def beats(service: str, instance: str) -> str:
    return f"health.beats.{escape(service)}.{escape(instance)}"


def service_control(service: str, instance: str) -> str:
    """Where the operator asks something of one instance."""
    return f"services.{escape(service)}.{escape(instance)}"


def connection(service: str, instance: str, part: str = "") -> str:
    """Name of a process's connection to the broker; `part` where an instance has more than one."""
    return "/".join(filter(None, (service, instance, part)))


def leader_connection(instance: str, group: str) -> str:
    """The same of a group's leader: an executor has one for each of its groups."""
    return connection("executor", instance, f"{LEADER}/{group}")


def batch_results(batch: str) -> str:
    """Where the results of a batch's lines are kept until its files are written."""
    return f"batches.results.{escape(batch)}"


def pin_key(model: str, session: str) -> str:
    """Key of a session in the bucket: no client's text, and of one length."""
    return hashlib.sha256(f"{model}\0{session}".encode()).hexdigest()[:40]

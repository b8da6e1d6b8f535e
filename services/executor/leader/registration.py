"""What a ring says of its model before it serves: the fingerprint, the parsers, and that the name is its own."""

import hashlib

import msgspec
import structlog

from services.executor.core.settings import ExecutorSettings
from shared.errors import ConfigurationError
from shared.messages import GroupRecord, ModelCard
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

log = structlog.get_logger(__name__)

_SETTINGS = (
    "engine",
    "dtype",
    "weight_dtype",
    "device",
    "tp",
    "kv_dtype",
    "kv_dtype_layers",
    "block_size",
    "collectives",
)


def fingerprint_of(settings: ExecutorSettings, card: ModelCard, numerics: str) -> str:
    """`fp_` and ten hexadecimal digits; the same for rings that draw the same tokens of the same seed, which
    compute with the same `numerics` (`EngineSpec`)."""
    parts = [card.tokenizer, card.fingerprint, str(card.vocab_size), numerics]
    parts += [f"{name}={getattr(settings, name)}" for name in _SETTINGS]
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:10]}"


def with_parsers(card: ModelCard, settings: ExecutorSettings) -> ModelCard:
    """`card` with the parsers that its operator has chosen."""
    return msgspec.structs.replace(
        card, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
    )


async def check_name(bus: Bus, card: ModelCard, group: str) -> None:
    """Two models under one name would be decoded with one tokenizer: the second is refused. Rings that compute
    one model differently may go on with each other's answers: that is told.

    Raises `ConfigurationError` where another group than `group` serves something else as `card.model`.
    """
    known = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get(card.model)
    if known is not None and known.value.fingerprint not in ("", card.fingerprint):
        log.warning(
            "fingerprint_changed",
            model=card.model,
            before=known.value.fingerprint,
            now=card.fingerprint,
            reason="answers that a ring of the one fingerprint began and one of the other ends may have other texts",
        )
    if known is None or (known.value.tokenizer, known.value.vocab_size) == (card.tokenizer, card.vocab_size):
        return
    records = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
    others = [
        record.group
        for record in records.values()
        if record.model == card.model and record.group != group and record.state in ("ready", "busy")
    ]
    if others:
        raise ConfigurationError(
            f"The group {others[0]} serves another model under the name {card.model}; give this one a name "
            "of its own with --served-model-name."
        )

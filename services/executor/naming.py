"""The name under which clients ask for a model."""

from pathlib import Path

import structlog

from services.executor.settings import ExecutorSettings
from shared.errors import ConfigurationError
from shared.messages import GroupRecord, ModelCard
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

log = structlog.get_logger(__name__)

STUB_MODEL = "stub"


def served_name(settings: ExecutorSettings) -> str:
    """The name that was set, else the last part of the path, else the hub name as it stands."""
    if settings.served_model_name:
        return settings.served_model_name
    if not settings.model:
        return STUB_MODEL
    path = Path(settings.model).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return settings.model


async def check_name(bus: Bus, card: ModelCard, group: str) -> None:
    """Two models under one name would be decoded with one tokenizer: the second is refused. Rings that compute
    one model differently may go on with each other's answers: that is told.

    Raises `ConfigurationError` where another group than `group` serves something else as `card.model`.
    """
    known = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get(card.model)
    if known is not None and known.value.fingerprint not in ("", card.fingerprint):
        log.warning(
            "computes_otherwise",
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

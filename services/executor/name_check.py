"""Two models under one name would be decoded with one tokenizer: the second is refused."""

from shared import subjects
from shared.bus import Bus
from shared.errors import ConfigurationError
from shared.messages import GroupRecord, ModelCard
from shared.stores import Bucket


async def check_name(bus: Bus, group: str, card: ModelCard) -> None:
    """Raises `ConfigurationError` when a group other than `group` serves another model under the name on `card`."""
    known = await (await Bucket.open(bus, subjects.MODELS_BUCKET, ModelCard)).get(card.model)
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

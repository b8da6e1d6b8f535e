"""The object stores of fine-tuning and of adapters: with a total of bytes, whose setting a refusal names."""

import pytest

from shared.config import CommonSettings
from shared.errors import StorageFull
from shared.nats import subjects
from shared.nats.adapters import AdapterFiles
from shared.nats.bus import Bus
from shared.nats.objects import Objects
from shared.nats.training import training_objects

MIB = 1 << 20


async def test_stores_have_a_total_that_is_a_setting(nats_settings: CommonSettings) -> None:
    given = nats_settings.model_copy(update={"adapters_max_bytes": 3 * MIB, "training_max_bytes": 2 * MIB})
    bus = await Bus.connect(given, "test")
    try:
        training = training_objects(bus)
        await training.open()
        await AdapterFiles(bus).open()
        assert await training.capacity() == 2 * MIB
        assert await Objects(bus, subjects.ADAPTERS_STORE).capacity() == 3 * MIB
        await training.put("one", b"x" * MIB)
        with pytest.raises(StorageFull, match="RYZANSTEIN_TRAINING_MAX_BYTES"):
            await training.put("two", b"x" * MIB)
        await training.delete("one")
        await training.put("two", b"x" * MIB)
    finally:
        await bus.close()

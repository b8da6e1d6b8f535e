"""A tenant's quota over what fine-tuning keeps."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.errors import QuotaExceeded
from services.gateway.training.settings import FineTuningSettings
from services.gateway.training.storage import Kept, TrainingStorage
from shared.messages import ModelCard
from shared.messages.registry import AdapterRecord
from shared.messages.training import Hyperparameters, TrainingJob
from shared.nats.bus import Bus

MIB = 1 << 20
CARD = ModelCard("m", 2048, 256, [0], "", 1, adapter_widths={"q_proj": MIB})


def world(**settings: Any) -> tuple[TrainingStorage, AdapterRegistry]:
    given = FineTuningSettings(**settings)
    bus = cast("Bus", SimpleNamespace(settings=given))
    adapters = AdapterRegistry(bus, 100.0)
    return TrainingStorage(adapters, given), adapters


def job(name: str, tenant: str = "acme", storage: int = 0) -> TrainingJob:
    return TrainingJob(name, tenant, 1.0, "m", "supervised", "f", "f", 1, storage=storage)


def model(name: str, of: str, tenant: str = "acme", size: int = 10, **fields: Any) -> AdapterRecord:
    return AdapterRecord(name, "m", of, "d", 8, size, tenant=tenant, job=of, **fields)


def test_unfinished_jobs_count_with_what_they_reserved_and_then_their_models() -> None:
    storage, adapters = world()
    storage.reserve(job("one", storage=100))
    storage.reserve(job("other", "umbrella", 1000))
    adapters._set("a", model("a", "one"))
    adapters._set("everybodys", model("everybodys", "", cast("str", None)))
    assert storage.usage("acme") == Kept(100, 4), "its checkpoint is part of that"
    storage.news("acme.one", msgspec.structs.replace(job("one", storage=100), clean=True))
    assert storage.usage("acme") == Kept(10, 1)
    adapters._set("a", msgspec.structs.replace(model("a", "one"), digest="", retired=[("d", 1)]))
    assert storage.usage("acme") == Kept(10, 1), "its files stay for a while"
    adapters._set("a", None)
    assert storage.usage("acme") == Kept(0, 0)


def test_a_job_that_does_not_fit_is_refused_by_name() -> None:
    storage, _ = world(tenant_training_bytes=100 * MIB)
    needed = storage.needed(CARD, Hyperparameters(epochs=1, rank=1), 1)
    storage.check("acme", needed)
    storage.reserve(job("one", storage=needed))
    storage.check("acme", 100 * MIB, but="one")
    storage.check("umbrella", 100 * MIB)
    with pytest.raises(QuotaExceeded, match="limit tenant_training_bytes: 104,857,600 bytes, RYZANSTEIN_TENANT_TRAIN"):
        storage.check("acme", 100 * MIB)


def test_models_are_counted_too_however_small_they_are() -> None:
    storage, adapters = world(tenant_fine_tuned_models=9)
    adapters._set("a", model("a", "earlier"))
    storage.check("acme", 1)
    storage.reserve(job("one"))
    storage.check("acme", 1)
    storage.reserve(job("two"))
    with pytest.raises(QuotaExceeded, match="limit tenant_fine_tuned_models: 9 entries, RYZANSTEIN_TENANT_FINE_TUNED"):
        storage.check("acme", 1)


def test_of_a_base_that_no_card_tells_of_each_job_has_its_share() -> None:
    storage, _ = world(tenant_training_bytes=160, tenant_training_jobs=16)
    unknown = msgspec.structs.replace(CARD, adapter_widths={})
    assert storage.needed(None, Hyperparameters()) == storage.needed(unknown, Hyperparameters()) == 10

"""A hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.model_store import transfer
from shared.model_store.settings import Store
from tests.unit.shared.model_store.hub_server import HubServer, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[HubServer]]:
    """Where HF_ENDPOINT leads to, in this process and in those that it starts."""
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serving() as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield HubServer


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")

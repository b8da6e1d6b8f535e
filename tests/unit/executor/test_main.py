"""What an executor is refused before it starts."""

import pytest

from services.executor import __main__ as executor
from services.executor.core.settings import ExecutorSettings
from shared.errors import ConfigurationError


def test_a_ring_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"PyTorch, which is not installed here; install it with: pip install"):
        executor.make(ExecutorSettings(model="any"))

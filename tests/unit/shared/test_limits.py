"""Every bound is named once, and its setting exists."""

import pytest

from services.executor.core.settings import ExecutorSettings
from services.gateway.service import GatewayService
from services.scheduler.settings import SchedulerSettings
from shared.config import ENV_PREFIX
from shared.limits import LIMITS, Limit

SETTINGS = (GatewayService.settings_type(), SchedulerSettings, ExecutorSettings)
DEFAULTS = [
    (ENV_PREFIX + name.upper(), field.default) for settings in SETTINGS for name, field in settings.model_fields.items()
]


def test_names_are_unique() -> None:
    names = [limit.name for limit in LIMITS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("limit", [limit for limit in LIMITS if limit.setting], ids=lambda limit: limit.name)
def test_a_limit_is_what_its_setting_is_by_default(limit: Limit) -> None:
    assert (limit.setting, limit.value) in DEFAULTS


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (Limit(4096, "bytes", "b", "request", name="a"), "limit a: 4,096 bytes, fixed"),
        (Limit(1, "tokens", "b", "gateway", "X_Y", "a"), "limit a: 1 tokens, X_Y changes it"),
    ],
)
def test_a_refusal_names_limit_value_and_setting(limit: Limit, words: str) -> None:
    assert limit.cited() == words
    assert limit.cited(7) == words.replace(f"{limit.value:,}", "7")

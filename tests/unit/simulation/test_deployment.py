"""What a simulated deployment says of the product holds: settings, constants, fields of messages."""

import msgspec
import pytest

from shared.messages import GenerationRequest, HostBeat, HostModel, LoadModel, ModelSpec
from tests.simulation.core.processes import Host, Process
from tests.simulation.deployment import settings, versions
from tests.simulation.deployment.services import ROLES


@pytest.mark.parametrize("role", sorted(ROLES.keys() - {"broker"}))
def test_settings_are_known_to_their_service(role: str) -> None:
    unknown = set(settings.of(role)) - set(ROLES[role].settings.model_fields)
    assert not unknown
    ROLES[role].settings(**settings.of(role))


@pytest.mark.parametrize(("role", "name", "of"), settings.RATIOS)
def test_times_that_belong_together_stay_in_proportion(role: str, name: str, of: str) -> None:
    fields, given = ROLES[role].settings.model_fields, settings.of(role)
    usual = fields[name].default / fields[of].default
    assert given[name] / given[of] == pytest.approx(usual)


def test_what_ticks_is_there_and_ticks_less_often() -> None:
    for pace, module in settings.constants():
        assert getattr(module, pace.name) <= pace.share * settings.SLOWER, pace


def test_the_previous_release_lacks_the_newest_fields() -> None:
    versions.check()
    process = Process("old", Host("there"))
    spec = ModelSpec("m", "built-in", pinned_by_request=True)
    request = GenerationRequest("g", "r", "m", "c", [1], 4, cache_ttl=5.0)
    beat = HostBeat(trains=2, models=[HostModel("m", "cold", failed_at=3.0)])
    try:
        versions.speak(process, versions.PREVIOUS_RELEASE)
        assert versions.without_news(LoadModel("g", spec)) == LoadModel("g", ModelSpec("m", "built-in"))
        assert versions.without_news([request]) == [msgspec.structs.replace(request, cache_ttl=0.0)]
        assert versions.without_news(beat) == HostBeat(models=[HostModel("m", "cold")])
        same = {"a": (1, "b"), "c": None}
        assert versions.without_news(same) == same
        child, other = Process("child", Host("there")), Process("other", Host("there"))
        versions.inherit(process, child)
        versions.inherit(other, Process("its child", Host("there")))
        assert versions._Spoken.old == {process, child}
        with pytest.raises(ValueError, match="no release 'next'"):
            versions.speak(process, "next")
    finally:
        versions.forget(process)
        versions.forget(child)


@pytest.mark.parametrize(
    ("struct", "field", "told"),
    [
        ("registry.HostBeat", "nothing", "HostBeat has no field nothing"),
        ("generations.GenerationRequest", "model", r"\['model', .*\] of .*GenerationRequest have no default"),
        ("registry.Nothing", "models", "there is no message shared.messages.registry.Nothing"),
    ],
)
def test_a_list_of_new_fields_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, struct: str, field: str, told: str
) -> None:
    monkeypatch.setitem(versions.NEW_FIELDS, f"shared.messages.{struct}", field)
    with pytest.raises(ValueError, match=told):
        versions.check()

"""Who is let in: nobody before the keys are known, everybody before there is one, then only those who have one."""

import hmac
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.auth import authenticator as module
from services.gateway.auth.authenticator import ANONYMOUS, Authenticator, Principal, token_of
from services.gateway.core.errors import AuthenticationFailed, describe, headers_of, status_of
from shared.errors import Unavailable
from shared.keys import KeyLimits, new_key

KEY = new_key("acme", 0.0, limits=KeyLimits(requests_per_minute=3))
OTHER = new_key("other", 0.0)


def ready(*, required: bool = False, clock: Callable[[], float] = lambda: 1.0) -> Authenticator:
    made = Authenticator(required=required, clock=clock)
    made.update(KEY.identity, KEY.record)
    made.complete()
    return made


def test_nothing_is_answered_before_the_keys_are_known() -> None:
    for required in (False, True):
        starting = Authenticator(required=required)
        for token in (None, KEY.token):
            with pytest.raises(Unavailable):
                starting.authenticate(token)
        with pytest.raises(Unavailable):
            starting.check(ANONYMOUS)


def test_everybody_is_let_in_until_the_first_key_exists() -> None:
    house = Authenticator()
    house.complete()
    assert house.open
    assert house.authenticate("whatever") == ANONYMOUS
    house.update(KEY.identity, KEY.record)
    assert not house.open
    with pytest.raises(AuthenticationFailed, match="didn't provide"):
        house.authenticate(None)
    with pytest.raises(AuthenticationFailed):
        house.check(ANONYMOUS)


def test_a_deployment_that_was_closed_stays_closed_when_the_records_are_lost() -> None:
    house = ready()
    house.update(KEY.identity, None)
    with pytest.raises(AuthenticationFailed):
        house.authenticate(None)
    with pytest.raises(AuthenticationFailed):
        house.authenticate(KEY.token)


def test_a_house_may_ask_for_keys_before_there_is_one() -> None:
    house = Authenticator(required=True)
    house.complete()
    with pytest.raises(AuthenticationFailed):
        house.authenticate(None)


def test_a_good_key_says_whose_it_is() -> None:
    assert ready().authenticate(KEY.token) == Principal(KEY.identity, "acme", KeyLimits(requests_per_minute=3))


@given(st.text(max_size=70) | st.just(OTHER.token) | st.just(KEY.token[:-1] + "~"))
def test_any_other_key_is_refused_in_the_same_words(token: str) -> None:
    house = ready()
    with pytest.raises(AuthenticationFailed) as refused:
        house.authenticate(token)
    shown = describe(refused.value, "r").error
    assert (status_of(refused.value), shown.code, shown.type) == (401, "invalid_api_key", "invalid_request_error")
    assert headers_of(refused.value)["www-authenticate"].startswith("Bearer")
    if len(token) > 30:
        assert token not in shown.message


def test_the_secret_of_another_key_is_no_use() -> None:
    mixed = f"rz-{KEY.identity}-{OTHER.token.split('-', 2)[2]}"
    with pytest.raises(AuthenticationFailed, match="Incorrect API key"):
        ready().authenticate(mixed)


def test_known_and_unknown_ids_are_compared_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    class Watched:
        @staticmethod
        def compare_digest(left: bytes, right: bytes) -> bool:
            compared.append((len(left), len(right)))
            return hmac.compare_digest(left, right)

    monkeypatch.setattr(module, "hmac", Watched)
    house = ready()
    house.authenticate(KEY.token)
    for wrong in (OTHER.token, KEY.token[:-2] + "zz", "nonsense"):
        with pytest.raises(AuthenticationFailed):
            house.authenticate(wrong)
    assert compared == [(32, 32)] * 4


def test_revoked_and_expired_keys_are_refused_for_open_connections_too() -> None:
    now = 1.0
    house = ready(clock=lambda: now)
    principal = house.authenticate(KEY.token)
    house.check(principal)
    house.update(KEY.identity, msgspec.structs.replace(KEY.record, expires=2.0))
    house.check(principal)
    now = 2.0
    with pytest.raises(AuthenticationFailed, match="has expired"):
        house.check(principal)
    house.update(KEY.identity, msgspec.structs.replace(KEY.record, revoked=1.0))
    for ask in (lambda: house.check(principal), lambda: house.authenticate(KEY.token)):
        with pytest.raises(AuthenticationFailed, match="was revoked"):
            ask()
    house.update(KEY.identity, None)
    with pytest.raises(AuthenticationFailed, match="no longer exists"):
        house.check(principal)


def test_accepted_work_goes_on_though_its_key_is_gone() -> None:
    house = ready()
    assert house.vouched(KEY.identity, "acme").limits == KeyLimits(requests_per_minute=3)
    house.update(KEY.identity, None)
    late = house.vouched(KEY.identity, "acme")
    house.check(late)
    assert (late.tenant, late.limits) == ("acme", KeyLimits())


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([], None),
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Bearer abc"), (b"x-api-key", b"no")], "abc"),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"Basic abc"), (b"api-key", b"yes")], "yes"),
        ([(b"x-api-key", b"yes")], "yes"),
        ([(b"authorization", b"Bearer")], ""),
    ],
)
def test_where_a_key_may_stand(headers: list[tuple[bytes, bytes]], token: str | None) -> None:
    assert token_of({"headers": headers}) == token


def test_when_a_key_was_used_last_is_forgotten_with_its_record() -> None:
    house = ready(clock=lambda: 5.0)
    assert house.used_at(KEY.identity) is None
    with pytest.raises(AuthenticationFailed):
        house.authenticate(f"rz-{KEY.identity}-{'a' * 43}")
    assert house.used_at(KEY.identity) is None
    house.authenticate(KEY.token)
    assert house.used_at(KEY.identity) == 5.0
    house.update(KEY.identity, None)
    assert house.used_at(KEY.identity) is None

"""API keys: their form, what is kept of them, and that no text shows one."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.keys import KeyRecord, digest_of, new_key, parse, redact


def test_a_key_is_its_id_and_a_secret_of_which_only_a_digest_is_kept() -> None:
    key = new_key("acme", 5.0, name="ci", expires=9.0)
    found = parse(key.token)
    identity, secret = found
    assert identity == key.identity
    assert len(secret) == 43  # 256 bits
    assert digest_of(secret) == key.record.digest
    assert secret.encode() not in msgspec.msgpack.encode(key.record)
    assert [key.record.state(now) for now in (8.9, 9.0)] == ["active", "expired"]


@given(st.text(max_size=80) | st.from_regex(r"rz-[0-9a-f]{11,13}-[A-Za-z0-9_=-]{42,44}", fullmatch=True))
def test_what_is_no_key_is_not_taken_for_one(text: str) -> None:
    found = parse(text)
    assert found is None or text == f"rz-{found[0]}-{found[1]}"


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_secret_is_left_in_a_text(before: str, after: str) -> None:
    key = new_key("acme", 0.0)
    secret = key.token.split("-", 2)[2]
    assert secret not in redact(f"{before}{key.token}{after}")


def test_texts_without_a_key_stay_as_they_are() -> None:
    for text in ("", "rz-", "a rz-1234 b", "the model rz-small is not served"):
        assert redact(text) == text


def test_records_of_an_older_release_are_read() -> None:
    old = msgspec.msgpack.encode({"digest": b"x", "tenant": "t", "created": 1.0})
    assert msgspec.msgpack.decode(old, type=KeyRecord).state(2.0) == "active"

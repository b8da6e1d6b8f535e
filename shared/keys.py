"""API keys: their form, what is kept of them, and how they are kept out of sight. Pure.

    rz-4f0c9a77e1b2-Zm9vYmFy...      what the client has, shown once
       id           secret           256 random bits
       │            └─▶ BLAKE2b ─▶ `KeyRecord.digest`, in the KV bucket `api_keys` under the id

A fast hash is enough: a slow one (bcrypt, scrypt, Argon2) makes guessing of what people choose dear, and 256 random
bits cannot be guessed at any speed. It costs a microsecond per request, so nothing about secrets need be cached.
"""

import hashlib
import re
import secrets
from typing import Any

import msgspec

_KEY = re.compile(r"rz-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_ANYWHERE = re.compile(r"(rz-[0-9a-f]{12})-[A-Za-z0-9_-]{16,}")
_PERSON = b"ryzanstein-key"  # sets these digests apart from other hashes of the same bytes


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """What may be done within a minute, and at once. 0: as the gateways' settings say."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0  # generations at the same time


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A key in the KV bucket `api_keys`, under its id; written by the command line alone.

    One that was revoked stays: with the last record the gateways would be open to everybody again.
    """

    digest: bytes
    tenant: str
    created: float  # Unix seconds, as the other times
    name: str = ""  # for people
    expires: float = 0.0  # 0: never
    revoked: float = 0.0  # 0: it is not
    limits: KeyLimits = KeyLimits()
    # Whether it may register, load, unload and remove models and adapters over the API.
    manage_models: bool = False
    view_keys: bool = False  # whether it may see all keys and their use over the API; no secret is among that

    def state(self, now: float) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"


class NewKey(msgspec.Struct, frozen=True):
    """A key that was just made: `token` is for its owner, the rest is kept."""

    token: str
    identity: str
    record: KeyRecord


def new_key(tenant: str, now: float, **fields: Any) -> NewKey:
    """A key of 256 random bits. Times are unix seconds; `fields`: others of its record."""
    identity, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return NewKey(f"rz-{identity}-{secret}", identity, KeyRecord(digest_of(secret), tenant, now, **fields))


def parse(token: str) -> tuple[str, str] | None:
    """(id, secret) of a key; None when it is none."""
    match = _KEY.fullmatch(token)
    return None if match is None else (match[1], match[2])


def digest_of(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.blake2b(secret.encode(), digest_size=32, person=_PERSON).digest()


def redact(text: str) -> str:
    """`text` with the secrets of all keys in it covered."""
    return _ANYWHERE.sub(r"\1-***", text) if "rz-" in text else text

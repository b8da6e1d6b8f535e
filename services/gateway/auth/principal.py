"""Who a request comes from."""

import msgspec

from shared.keys import KeyLimits


class Principal(msgspec.Struct, frozen=True):
    """The owner of a key; what belongs to one tenant is not there for another."""

    key: str = ""
    """Id of the key; empty: nobody in particular, while no key exists."""
    tenant: str = ""
    limits: KeyLimits = KeyLimits()
    vouched: bool = False
    """Work that was accepted from this principal earlier: what becomes of its key since then stops it not."""


ANONYMOUS = Principal()
"""Whoever asks before the first key exists."""

"""How two ends of a connection show each other that they know a key, without saying it.

Each chooses a nonce, and the other answers with an HMAC of it under the key (RFC 2104). What an answer is made of
names its side, so that it cannot be sent back as the other side's.
"""

import hmac


def proof(key: bytes, side: str, nonces: bytes) -> bytes:
    """32 bytes: that `side` knows `key`, for whoever chose one of `nonces`."""
    return hmac.digest(key, side.encode() + b":" + nonces, "sha256")


def is_proof(shown: bytes | bytearray, key: bytes, side: str, nonces: bytes) -> bool:
    return hmac.compare_digest(bytes(shown), proof(key, side, nonces))

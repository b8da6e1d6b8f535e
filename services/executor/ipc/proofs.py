"""How two ends of a connection show each other that they know a key, without saying it, and that messages are theirs.

Each chooses a nonce, and the other answers with an HMAC of it under the key (RFC 2104). What an answer is made of
names its side, so that it cannot be sent back as the other side's. From then on each message may carry a MAC under
a key of that session and direction: who only passes a greeting on can change, repeat, reorder or leave out nothing
unseen. What is said is not encrypted.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time

MAC_SIZE = 16  # bytes of a message's MAC
NONCE_SIZE = 16
PROOF_SIZE = 32
_COUNT = struct.Struct("<Q")


def proof(key: bytes, side: str, nonces: bytes) -> bytes:
    """32 bytes: that `side` knows `key`, for whoever chose one of `nonces`."""
    return hmac.digest(key, side.encode() + b":" + nonces, "sha256")


def is_proof(shown: bytes | bytearray, key: bytes, side: str, nonces: bytes) -> bool:
    return hmac.compare_digest(bytes(shown), proof(key, side, nonces))


def challenge(connection: socket.socket, key: bytes, side: str, other: str, by: float) -> bytes | None:
    """The greeting of `side`, which speaks first, until `by` (monotonic seconds).

    Returns the nonces of both ends, or None where the `other` does not know `key`: it is told nothing then. Raises
    OSError where the connection ends or does not answer in time.
    """
    mine = secrets.token_bytes(NONCE_SIZE)
    connection.sendall(mine)
    shown = read_exactly(connection, NONCE_SIZE + PROOF_SIZE, by)
    nonces = mine + shown[:NONCE_SIZE]
    if not is_proof(shown[NONCE_SIZE:], key, other, nonces):
        return None
    connection.sendall(proof(key, side, nonces))
    return nonces


def respond(connection: socket.socket, key: bytes, side: str, other: str, by: float) -> bytes | None:
    """The greeting of the other end; as `challenge`."""
    theirs, mine = read_exactly(connection, NONCE_SIZE, by), secrets.token_bytes(NONCE_SIZE)
    nonces = bytes(theirs) + mine
    connection.sendall(mine + proof(key, side, nonces))
    return nonces if is_proof(read_exactly(connection, PROOF_SIZE, by), key, other, nonces) else None


def read_exactly(connection: socket.socket, count: int, by: float | None = None) -> bytearray:
    """`count` bytes. Raises OSError: where the connection ends before, and TimeoutError `by` then (monotonic
    seconds)."""
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        if by is not None:
            connection.settimeout(max(1e-3, by - time.monotonic()))
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the other side has closed the connection")
        view = view[received:]
    return buffer


class MessageMac:
    """MACs of the messages that one side of a session says, in their order: BLAKE2b (RFC 7693), keyed, over the
    message's number and bytes. Either end has one for each direction."""

    def __init__(self, key: bytes, side: str, nonces: bytes) -> None:
        """`nonces`: of both ends; one of them new is enough for a key that no other session has."""
        self._key = proof(key, f"messages of {side}", nonces)
        self._count = 0

    def next(self, payload: bytes | bytearray | memoryview) -> bytes:
        """The MAC of the next message, `MAC_SIZE` bytes."""
        mac = hashlib.blake2b(_COUNT.pack(self._count), key=self._key, digest_size=MAC_SIZE)
        self._count += 1
        mac.update(payload)
        return mac.digest()

    def accepts(self, shown: bytes | bytearray | memoryview, payload: bytes | bytearray | memoryview) -> bool:
        """Whether `shown` is the next message's. After a False the session is of no more use."""
        return hmac.compare_digest(bytes(shown), self.next(payload))

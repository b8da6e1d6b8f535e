"""What host 0 and the other hosts of a ring say to each other: length-prefixed MessagePack over TCP.

Everything behind the greeting carries a MAC of the session (`proofs.MessageMac`).

host 0 ── Challenge ──▶ host n        both show that they know the secret, and neither sends it
host 0 ◀─── Hello ───── host n
host 0 ─── Welcome ───▶ host n        or Refused, with the reason
then Begin, Input, Kill, Alive  ──▶
     ◀── Event, Ended, Rows (which says that the host lives, too)
"""

import asyncio
import contextlib
import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from services.executor.ipc.proofs import MAC_SIZE, MessageMac

SILENCE = 10.0  # seconds without a word after which the other side is taken for gone
BEAT = 1.0  # seconds between two words of host 0
ROWS = 0.2  # seconds between two copies of the rows of a host's ranks
GREETING = 5.0  # seconds for the greeting
MOST_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    node: int
    nonce: bytes
    proof: bytes
    version: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Start the process of a rank, of a ring's life; its specification is the first input."""

    rank: int
    epoch: int


class Input(msgspec.Struct, frozen=True, tag="input"):
    """A line for a rank's standard input."""

    rank: int
    epoch: int
    line: bytes


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End every rank of that ring and of earlier ones."""

    epoch: int


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Host 0 is there."""


class RankEvent(msgspec.Struct, frozen=True, tag="event"):
    """A line of a rank's events."""

    rank: int
    epoch: int
    line: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A rank's process has ended; `code` as asyncio has it, below 0: by that signal."""

    rank: int
    epoch: int
    code: int


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows of the board, by rank."""

    epoch: int
    rows: dict[int, list[int]]


ToNode = Challenge | Welcome | Refused | Begin | Input | Kill | Alive
ToHead = Hello | RankEvent | Ended | Rows
Said = TypeVar("Said")
_encoder = msgspec.msgpack.Encoder()


class LineLost(Exception):
    """The other side is gone, silent, or says what is no message."""


@dataclass(eq=False)
class Channel(Generic[Said]):
    """One connection, read as messages of one side."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: msgspec.msgpack.Decoder[Said]
    # Of what is sent and of what is received; None: before the greeting is over.
    macs: tuple[MessageMac, MessageMac] | None = None

    def protected(self, sent: MessageMac, received: MessageMac) -> "Channel[Said]":
        """The same connection once both ends have shown that they know the secret."""
        return Channel(self.reader, self.writer, self.decoder, (sent, received))

    def send(self, message: msgspec.Struct) -> None:
        """Into the socket's buffer; on a line that is lost, nothing."""
        if self.writer.is_closing():
            return
        payload = _encoder.encode(message)
        mac = b"" if self.macs is None else self.macs[0].next(payload)
        self.writer.write(_LENGTH.pack(len(payload)) + payload + mac)

    async def receive(self, within: float = SILENCE) -> Said:
        """Raises `LineLost`."""
        try:
            async with asyncio.timeout(within):
                (size,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
                if size > MOST_BYTES:
                    raise LineLost(f"a message of {size:,} bytes was announced")
                payload = await self.reader.readexactly(size)
                if self.macs is not None and not self.macs[1].accepts(await self.reader.readexactly(MAC_SIZE), payload):
                    raise LineLost("a message was changed on its way")
                return self.decoder.decode(payload)
        except TimeoutError:
            raise LineLost(f"nothing was heard for {within:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise LineLost("the connection was closed") from None
        except msgspec.MsgspecError as error:
            raise LineLost(f"it sent something that is not a message ({error})") from None

    async def close(self) -> None:
        """What was sent last goes out first."""
        self.writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.writer.wait_closed()


def to_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel[ToHead]:
    return Channel(reader, writer, msgspec.msgpack.Decoder(ToHead))


def to_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Channel[ToNode]:
    return Channel(reader, writer, msgspec.msgpack.Decoder(ToNode))

"""What a leader tells its ranks about a hand-over. Travels in step plans (`StepPlan.handover`)."""

import msgspec


class Receive(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Listen, and take the next `count` blocks from whoever has `key`. An earlier batch is over."""

    batch: int
    key: bytes
    count: int


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send these blocks, in this order, to the rank of the same number."""

    batch: int
    key: bytes
    addresses: list[tuple[str, int]]
    """`(host, port)` per rank."""
    blocks: list[int]
    within: float
    """Seconds after which what has not been acknowledged is given up."""


class StopReceiving(msgspec.Struct, frozen=True, array_like=True, tag="stop-receiving"):
    """Listen no more, and forget what was received."""


class StopSending(msgspec.Struct, frozen=True, array_like=True, tag="stop-sending"):
    """Send no more of the batch; the rank says when it has stopped."""


Command = Receive | Send | StopReceiving | StopSending
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    return msgspec.msgpack.encode(command)


def decode_command(payload: bytes) -> Command:
    """Raises `msgspec.DecodeError`."""
    return _decoder.decode(payload)

"""nats-py's client, where its ways are not ours."""

import asyncio
import logging

import nats.aio.client
import nats.errors


class NatsClient(nats.aio.client.Client):
    """A NATS client whose connection a late answer does not end.

    A flush that nobody waits for any more, cancelled or over its time, stays among nats-py's questions: the answer to
    it would be an error in what reads the connection.
    """

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class TlsClient(NatsClient):
    """A NATS client that says nothing, its password least of all, to a server that offers no TLS.

    nats-py encrypts where the server says so; whoever sits between could say that it does not.
    """

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("asyncio").addFilter(_without_eof_note)

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise PlainServer
        return bytes(super()._connect_command())


def _without_eof_note(record: logging.LogRecord) -> bool:
    """asyncio remarks on nats-py's way of closing, at each connection's end; there is nothing to do about it."""
    return "eof_received() has no effect when using ssl" not in record.getMessage()


class PlainServer(nats.errors.Error):
    """The server would have everything unencrypted."""

    def __str__(self) -> str:
        return "the server does not ask for TLS"

"""Which hosts host 0 takes, and what it tells those that it does not."""

import socket

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.proofs import proof
from services.executor.supervisor.multinode.head import HeadNode
from services.executor.supervisor.multinode.wire import Hello
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.process import VERSION

SECRET, NONCE = "s" * 32, b"n" * 32


def head(port: int = 1) -> HeadNode:
    return HeadNode(
        load_settings(
            ExecutorSettings, model="m", tp=2, nnodes=2, master_addr="127.0.0.1", master_port=port, ring_secret=SECRET
        )
    )


def hello(node: int = 1, *, secret: str = SECRET, version: str = VERSION) -> Hello:
    return Hello(node, b"", proof(secret.encode(), f"node {node}", NONCE), version)


@pytest.mark.parametrize(
    ("said", "objection"),
    [
        (hello(), ""),
        (hello(secret="another"), "does not know the ring's secret"),
        (hello(version="0"), "runs version 0 and host 0 runs"),
        (hello(2), "its node rank 2 is not one of 1 to 1"),
        (hello(0), "its node rank 0 is not one of 1 to 1"),
    ],
)
def test_a_host_that_does_not_belong_to_the_ring_hears_why(said: Hello, objection: str) -> None:
    found = head()._objection(said, NONCE)
    assert objection in found
    assert bool(found) == bool(objection)


async def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match=r"127\.0\.0\.1"):
        await head(taken.getsockname()[1]).start()

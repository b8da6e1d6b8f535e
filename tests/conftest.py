"""What all tests share: settings of the libraries, and a real NATS server."""

import functools
import gc
import os
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import structlog

# gRPC's threads do not survive the fork before a child is started: without this some children end before they begin.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# The weights of tests' models are not for the cache of whoever runs them.
os.environ.setdefault("RYZANSTEIN_WEIGHT_CACHE_BYTES", "0")

from benchmarks.on_gpu.device import choose
from services.cli.supervision.nats_server import LocalNats
from services.executor.native import library
from shared.config import CommonSettings
from shared.nats.bus import Bus
from shared.nats.streams import ensure_streams
from tests.covered import CHOSEN, Traced
from tests.durations import Durations, is_whole
from tests.nats_accounts import NatsAccounts
from tests.order import pytest_collection_modifyitems  # noqa: F401 (a hook)
from tests.unit.executor.cpu.emulation import compilers, emulate_amx

# Thousands of tests come, and nothing goes before they run: see pytest_collection_finish.
gc.disable()
# Before anything imports Triton, transformers among it: what is decorated first decides for the whole process.
choose()
# How long an example takes says something about the machine, and no test is about the machine. A longer search sets
# RYZANSTEIN_TEST_EXAMPLES.
hypothesis.settings.register_profile(
    "untimed",
    max_examples=int(os.environ.get("RYZANSTEIN_TEST_EXAMPLES") or 40),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")


_make_context = httpx._transports.default.create_ssl_context


@functools.cache
def _context_of_authorities(*, trust_env: bool) -> ssl.SSLContext:
    return _make_context(trust_env=trust_env)


def _shared_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """One for all of httpx's clients that name no certificates: to read those of all authorities takes 20 ms, most of
    what a test of a few requests takes."""
    if verify is True and cert is None:
        return _context_of_authorities(trust_env=trust_env)
    return _make_context(verify=verify, cert=cert, trust_env=trust_env)


httpx._transports.default.create_ssl_context = _shared_context


def pytest_report_header() -> list[str]:
    """What decides which kernels' tests run here."""
    return [f"CPU levels: {', '.join(library.levels()) or library.why_not()}", f"C compilers: {', '.join(compilers())}"]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Traced(os.environ.get(CHOSEN, "")))
    if not hasattr(config, "workerinput"):  # those report to this one
        config.pluginmanager.register(Durations(whole=is_whole(config)))


def pytest_sessionstart() -> None:
    if os.environ.get("RYZANSTEIN_TEST_EMULATE") == "amx":
        emulate_amx()


def pytest_collection_finish() -> None:
    """What is there for good, PyTorch and thousands of tests, the garbage collector need not walk again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def usual_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command's `main` sets up for its process is not there for the next test. Loggers that are used meanwhile
    would keep it if they were cached."""
    configure = structlog.configure

    def uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", uncached)
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The program that is started as nats-server: with RYZANSTEIN_TEST_NATS=model, the simulator's model of it."""
    if os.environ.get("RYZANSTEIN_TEST_NATS") != "model":
        yield
        return
    program = tmp_path_factory.mktemp("model") / "nats-server"
    root = Path(__file__).parents[1]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.simulation.broker "$@"\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.cli.supervision.nats_server.find_binary", lambda: program)
        yield


@pytest.fixture(scope="session")
def nats_accounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsAccounts]:
    accounts = NatsAccounts(tmp_path_factory.mktemp("nats"))
    yield accounts
    accounts.stop()


@pytest.fixture
async def own_nats(tmp_path: Path) -> AsyncIterator[CommonSettings]:
    """Settings for a NATS server of the test's own: the binary, or a container where asked for.

    RYZANSTEIN_TEST_NATS=container runs the same tests against the official image (needs Docker), and =model against
    the simulator's model of it.
    """
    if os.environ.get("RYZANSTEIN_TEST_NATS") == "container":
        from testcontainers.nats import NatsContainer

        with NatsContainer(jetstream=True) as container:
            yield CommonSettings(nats_url=container.nats_uri(), beat_interval=0.1)
        return
    server = LocalNats(tmp_path / "nats")
    await server.start()
    try:
        yield server.settings(beat_interval=0.1)
    finally:
        await server.stop()


@pytest.fixture
def nats_settings(request: pytest.FixtureRequest) -> CommonSettings:
    """Settings for NATS with nothing in it: an account of the test's own on a server that tests share."""
    if "RYZANSTEIN_TEST_NATS" in os.environ:
        own: CommonSettings = request.getfixturevalue("own_nats")
        return own
    accounts: NatsAccounts = request.getfixturevalue("nats_accounts")
    return accounts.settings().model_copy(update={"beat_interval": 0.1})


@pytest.fixture
async def bus(nats_settings: CommonSettings) -> AsyncIterator[Bus]:
    """A connection of the test's own, with the streams in place."""
    connection = await Bus.connect(nats_settings, "test")
    await ensure_streams(connection)
    yield connection
    await connection.close()

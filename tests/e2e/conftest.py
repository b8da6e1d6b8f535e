"""The real model, and stacks that several tests share."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from services.cli.target import LocalSettings
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The default model, pulled and converted where that has not happened on this machine."""
    return ensure_model(DEFAULT_MODEL, LocalSettings().store, lambda stage, done, total: None)[1]


@pytest.fixture(scope="package")
def two_groups(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Stack]:
    """Two groups of one rank, fp32."""
    directory = tmp_path_factory.mktemp("two-groups")
    with Stack(directory, "--replicas", "2", "--dtype", "fp32") as stack:
        yield stack


@pytest.fixture(scope="package")
def one_ring_of_two(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Stack]:
    """One group of two ranks, fp32."""
    with Stack(tmp_path_factory.mktemp("ring-of-two"), "--tp", "2", "--dtype", "fp32") as stack:
        yield stack


@pytest.fixture
def connect() -> Iterator[Callable[[Stack], openai.OpenAI]]:
    """Makes official clients of a stack, and closes them."""
    with contextlib.ExitStack() as clients:

        def make(stack: Stack) -> openai.OpenAI:
            http = clients.enter_context(httpx.Client(trust_env=False, timeout=120))
            return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=http)

        yield make


@pytest.fixture
def client(connect: Callable[[Stack], openai.OpenAI], two_groups: Stack) -> openai.OpenAI:
    return connect(two_groups)


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    """Of the `stack` of the test's file."""
    with httpx.Client(base_url=stack.url, trust_env=False, timeout=60) as client:
        yield client

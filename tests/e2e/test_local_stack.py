"""The local stack with the stub engine: what a user, a crash or another stack does to it."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import grpc
import httpx
import pytest

from services.cli.target import read_run_file
from services.gateway.api.grpc.generated import inference_pb2 as pb
from shared.config import CommonSettings
from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.stack import Stack, run_cli

pytestmark = pytest.mark.e2e

STUB = ("--engine", "stub", "--no-smoke-test")


def ask(stack: Stack) -> httpx.Response:
    body = {"model": "stub", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    return httpx.post(f"{stack.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)


def ask_until_answered(stack: Stack) -> httpx.Response:
    """As clients do: a 503 says that the same request may be answered later."""
    deadline = time.monotonic() + 30
    while (reply := ask(stack)).status_code == 503:
        assert time.monotonic() < deadline, f"{reply.text}\n{stack.logs()}"
    return reply


@pytest.mark.slow
def test_a_killed_nats_comes_back_and_requests_are_answered(tmp_path: Path) -> None:
    with Stack(tmp_path, *STUB) as stack:
        assert ask(stack).status_code == 200
        before = read_run_file(tmp_path)
        os.kill(stack.pid_of("nats-server"), signal.SIGKILL)
        stack.read_until("NATS was killed by SIGKILL; it is started again")
        stack.read_until("NATS is back.")
        assert read_run_file(tmp_path) == before, "the same port and credentials"
        reply = ask_until_answered(stack)
        assert reply.status_code == 200, f"{reply.text}\n{stack.logs()}"
        assert {service["state"] for service in stack.status()["services"]} == {"ready"}


def list_models(stack: Stack) -> list[str]:
    """What the gRPC API answers at the address that the command has printed."""
    address = stack.output.partition("gRPC  ")[2].split()[0]
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/ryzanstein.v1.InferenceService/ListModels", response_deserializer=pb.ListModelsResponse.FromString
        )
        return [model.id for model in call(b"", timeout=20, wait_for_ready=True).models]


@pytest.mark.slow
def test_a_killed_gateway_comes_back_where_it_was(tmp_path: Path) -> None:
    with Stack(tmp_path, *STUB) as stack:
        url = stack.url
        assert list_models(stack) == ["stub"]
        pid = stack.pid_of("services.gateway")
        os.kill(pid, signal.SIGKILL)
        stack.read_until("gateway-0 ended (The gateway was killed by SIGKILL")
        deadline = time.monotonic() + 30
        while True:
            try:
                if ask(stack).status_code == 200:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline, stack.logs("gateway*")
        assert stack.url == url
        assert list_models(stack) == ["stub"], "the same gRPC port"
        assert stack.pid_of("services.gateway") != pid


@pytest.mark.slow
def test_a_killed_gateway_of_several_is_missed_by_nobody(tmp_path: Path) -> None:
    """The others have its connections at once, and it has some again when it is ready."""

    def answered() -> str:
        assert ask(stack).status_code == 200, stack.logs("gateway*")
        return str(httpx.get(f"{stack.url}/ready", trust_env=False).raise_for_status().json()["instance"])

    with Stack(tmp_path, *STUB, "--gateways", "3") as stack:
        assert list_models(stack) == ["stub"]
        seen: set[str] = set()
        while len(seen) < 3:
            seen.add(answered())
        note = read_run_file(tmp_path)
        killed = next(one for one in note.started if one.instance == "gateway-1")
        os.kill(killed.pid, signal.SIGKILL)
        stack.read_until("gateway-1 ended (The gateway was killed by SIGKILL")
        deadline = time.monotonic() + 60
        while answered() != "gateway-1":
            assert time.monotonic() < deadline, stack.logs("gateway*")
        while {one["state"] for one in stack.status()["services"] if "gateway" in one["instance"]} != {"ready"}:
            assert time.monotonic() < deadline, stack.status()


@pytest.mark.nightly
async def test_two_stacks_on_one_nats_leave_each_other_alone(tmp_path: Path, nats_settings: CommonSettings) -> None:
    """One is told of it by its option, the other by the environment; neither shows the password."""
    password = nats_settings.nats_password.get_secret_value()
    url = nats_settings.nats_url.replace("://", f"://{nats_settings.nats_user}:{password}@")
    one = Stack(tmp_path / "one", *STUB, "--nats-url", url)
    other = Stack(tmp_path / "other", *STUB, RYZANSTEIN_NATS_URL=url)
    with one, other:
        status = await asyncio.to_thread(one.status)
        assert len({group["group"] for group in status["groups"]}) == 2
        assert len({service["instance"] for service in status["services"]}) == 8
        assert {service["state"] for service in status["services"]} == {"ready"}
        assert one.url != other.url
        for stack in (one, other):
            assert ask(stack).status_code == 200
            assert not [process for process in stack.descendants() if "nats-server" in process.name()]
    for stack in (one, other):
        assert "ended" not in stack.output
        assert password not in stack.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_that_hangs(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:
        environment = {
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": "/dev/null",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "RYZANSTEIN_MODEL_CACHE": str(tmp_path / "cache"),
        }
        stack = Stack(tmp_path / "data", "--model", DEFAULT_MODEL, **environment)
        stack.begin()
        try:
            stack.read_until("model: downloading")
            connection, _ = index.accept()
            with connection:
                processes = stack.descendants()
                assert any("pip" in process.cmdline() for process in processes)
                stack.process.send_signal(number)
                assert stack.process.wait(20) == 130
        finally:
            stack.__exit__()
    assert not [process for process in processes if process.is_running()]
    left = [file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.parent.name != ".locks"]
    assert left == []


@pytest.mark.slow
def test_a_machine_with_too_few_gpus_says_so_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: Some GPU (UUID: GPU-1)'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ("up", "--port", "0", "--replicas", "2", "--data-dir", str(tmp_path / "data"), "--model", "/none")
    result = run_cli(*command, PATH=path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: 2 groups of 1 rank need 2 GPUs, and 1 can be used here;")
    on_cpu = run_cli(*command, PATH=path, RYZANSTEIN_DEVICE="cpu")
    assert "'/none' is not a model" in on_cpu.stderr, "with the CPU chosen, GPUs are not asked for"


@pytest.mark.slow
def test_a_second_run_keeps_one_earlier_log(tmp_path: Path) -> None:
    for _ in range(2):
        with Stack(tmp_path, *STUB):
            pass
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    services = ("gateway", "scheduler", "executor", "health-monitor")
    assert names == {f"{service}-0.log{old}" for service in services for old in ("", ".1")}
    assert all(path.read_text().count('"event": "stopped"') == 1 for path in (tmp_path / "logs").iterdir())

"""Parts of the local stack that need no network."""

import os
import signal
import stat
from pathlib import Path

import msgspec
import pytest

from services.cli.serve import MODULES
from services.cli.supervision.stack import Child, LocalStack, StackPlan, bracketed, ending, reachable, set_aside
from services.cli.target import (
    RunFile,
    StackSettings,
    existing_nats,
    gateway_of_stack,
    lock,
    nats_of_stack,
    read_run_file,
    remove_run_file,
    without_credentials,
    write_run_file,
)
from shared.config import CommonSettings, load_settings
from shared.errors import ConfigurationError, PortInUse
from shared.messages import Heartbeat
from shared.service.http_server import HttpServer
from shared.service.listener import bind


def note(pid: int) -> RunFile:
    return RunFile(pid, "http://127.0.0.1:8000", "nats://127.0.0.1:4222", "user", "secret")


def test_the_note_of_a_running_stack_is_found_and_private(tmp_path: Path) -> None:
    assert read_run_file(tmp_path) is None
    write_run_file(tmp_path, note(os.getpid()))
    assert read_run_file(tmp_path) == note(os.getpid())
    assert [path.stat().st_mode & 0o077 for path in tmp_path.iterdir()] == [0]
    remove_run_file(tmp_path)
    assert read_run_file(tmp_path) is None


def test_the_note_of_a_dead_stack_counts_not(tmp_path: Path) -> None:
    write_run_file(tmp_path, note(2**22 + 1))
    assert read_run_file(tmp_path) is None


def test_a_stack_that_starts_is_found_by_who_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("RYZANSTEIN_URL", raising=False)
    with lock(tmp_path):
        with pytest.raises(ConfigurationError, match="has started no service yet"):
            nats_of_stack(None, "")
        write_run_file(tmp_path, msgspec.structs.replace(note(os.getpid()), gateway_url=""))
        assert read_run_file(tmp_path) is None
        assert nats_of_stack(None, "").nats_user == "user"
        with pytest.raises(ConfigurationError, match="`ryzanstein status` shows how far each service is"):
            gateway_of_stack(None)  # and not whatever else answers on port 8000
        write_run_file(tmp_path, note(os.getpid()))
        assert gateway_of_stack(None).url == note(0).gateway_url


def test_one_stack_per_data_directory(tmp_path: Path) -> None:
    with lock(tmp_path / "new"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700, "credentials lie there"
    with lock(tmp_path / "new"), pytest.raises(ConfigurationError, match="Another stack already runs"):
        lock(tmp_path / "new")
    lock(tmp_path / "new").close()


def test_a_data_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be used .*--data-dir"):
        lock(tmp_path / "file")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://host:4222", ("nats://host:4222", "", "")),
        ("nats://me:pa:ss@host:4222", ("nats://host:4222", "me", "pa:ss")),
        ("nats://me:p%40ss%2F@host", ("nats://host", "me", "p@ss/")),
        ("tls://host", ("tls://host", "", "")),
        ("nats://a:1, nats://b:2", ("nats://a:1,nats://b:2", "", "")),
        ("nats://me:pw@a:1,nats://me:pw@b:2", ("nats://a:1,nats://b:2", "me", "pw")),
        ("nats://me:pw@a:1,nats://b:2", ("nats://a:1,nats://b:2", "me", "pw")),
        ("nats://token@host:1", ("nats://token@host:1", "", "")),
        ("nats://me:pw@a,nats://you:pw@b", ("nats://me:pw@a,nats://you:pw@b", "", "")),
    ],
)
def test_credentials_may_stand_in_the_nats_address(url: str, expected: tuple[str, str, str]) -> None:
    """One pair goes to the settings; what the settings have no word for stays where the client reads it."""
    settings = existing_nats(CommonSettings(), url)
    assert (settings.nats_url, settings.nats_user, settings.nats_password.get_secret_value()) == expected


def test_other_settings_stay_as_they_are() -> None:
    settings = CommonSettings(nats_connect_timeout=3, nats_user="me", nats_password="pw")  # type: ignore[arg-type]
    for url in ("nats://host", "nats://you:pw@host", "nats://token@host"):
        assert existing_nats(settings, url).nats_connect_timeout == 3
    assert existing_nats(settings, "nats://host").nats_user == "me"


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("nats://token@host:4222", "nats://host:4222"),
        ("nats://me:pw@a,tls://you:p@w@b:1", "nats://a,tls://b:1"),
        ("nats:/me:pw@a", "nats:/a"),
        ("me:pw@a", "a"),
    ],
)
def test_credentials_are_never_shown(urls: str, shown: str) -> None:
    assert without_credentials(urls) == shown


@pytest.mark.parametrize("url", ["host:4222", "nats://", "http://host", "nats://a,b", "nats:/me:secret@host", ""])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(ConfigurationError, match="NATS address") as caught:
        existing_nats(CommonSettings(), url)
    assert "secret" not in str(caught.value)


# --- names, arguments, beats ---------------------------------------------------------------------


def make_stack(tmp_path: Path, nats: CommonSettings | None = None, **plan: object) -> LocalStack:
    whole: dict[str, object] = {
        "data_dir": tmp_path,
        "model": "",
        "served_model_name": "m",
        "host": "127.0.0.1",
        "port": 0,
        "tp": 2,
        "replicas": 2,
        "dtype": "auto",
        **plan,
    }
    stack = LocalStack(StackPlan(nats=nats, **whole), load_settings(StackSettings))  # type: ignore[arg-type]
    stack.children = stack._make_services() + stack._make_executors()
    return stack


def executors_of(stack: LocalStack) -> list[list[str]]:
    return [child.arguments for child in stack.children if child.service == "executor"]


@pytest.mark.parametrize("what", ["kv", "weight"])
def test_executors_are_told_how_to_keep_blocks_and_weights_where_the_command_says_so(tmp_path: Path, what: str) -> None:
    assert not any(f"--{what}-dtype" in arguments for arguments in executors_of(make_stack(tmp_path)))
    for arguments in executors_of(make_stack(tmp_path, **{f"{what}_dtype": "int8"})):
        assert arguments[arguments.index(f"--{what}-dtype") + 1] == "int8"


def test_parsers_are_the_executors_own_unless_they_are_given(tmp_path: Path) -> None:
    assert not any("--tool-parser" in arguments for arguments in executors_of(make_stack(tmp_path)))
    arguments = executors_of(make_stack(tmp_path, tool_parser="mistral", reasoning_parser="none"))[0]
    assert arguments[arguments.index("--tool-parser") + 1] == "mistral"
    assert arguments[arguments.index("--reasoning-parser") + 1] == "none"


def test_the_draft_model_is_the_executors_and_that_of_whatever_replaces_them(tmp_path: Path) -> None:
    for draft in ("", "/models/small"):
        stack = make_stack(tmp_path, draft_model=draft)
        arguments, own = executors_of(stack)[0], stack.plan.own_spec()
        assert ("--draft-model" in arguments) == bool(draft)
        assert own.settings.draft_model == (draft or None)


def groups_of(stack: LocalStack) -> list[str]:
    return [one.arguments[one.arguments.index("--group") + 1] for one in stack.children if "--group" in one.arguments]


def test_names_are_plain_on_a_nats_of_our_own_and_marked_on_another(tmp_path: Path) -> None:
    own = make_stack(tmp_path)
    assert [child.instance for child in own.children] == [
        "health-monitor-0",
        "scheduler-0",
        "gateway-0",
        "executor-0",
        "executor-1",
    ]
    assert groups_of(own) == ["group-0", "group-1"]
    one, other = (make_stack(tmp_path, CommonSettings()) for _ in range(2))
    names = [{child.instance for child in stack.children} | set(groups_of(stack)) for stack in (own, one, other)]
    assert len(set.union(*names)) == 3 * 7, "no name twice"
    assert {child.log.name for child in one.children} == {child.log.name for child in own.children}


def test_several_gateways_share_their_ports_and_each_has_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RYZANSTEIN_GATEWAYS", "3")
    stack = make_stack(tmp_path, grpc_port=0)
    stack._reserve_ports()
    stack.children = stack._make_services() + stack._make_executors()
    asked = [child.arguments for child in stack.children if child.service == "gateway"]

    def ports(option: str) -> set[int]:
        return {int(arguments[arguments.index(option) + 1]) for arguments in asked}

    assert (len(asked), len(ports("--port")), len(ports("--grpc-port")), len(ports("--ops-port"))) == (3, 1, 1, 3)
    assert 0 not in ports("--port") | ports("--grpc-port")
    assert all("--share-port" in arguments for arguments in asked)
    with pytest.raises(PortInUse):
        bind("127.0.0.1", ports("--port").pop())
    for sock in stack._reserved:
        sock.close()


def test_one_gateway_shares_nothing(tmp_path: Path) -> None:
    assert "--share-port" not in make_stack(tmp_path)._gateway_arguments(0)


def test_each_group_has_gpus_of_its_own(tmp_path: Path) -> None:
    stack = make_stack(tmp_path, gpus=["0,1", "2,3"])
    devices = [child._environment.get("CUDA_VISIBLE_DEVICES") for child in stack.children]
    assert devices == [None, None, None, "0,1", "2,3"]
    without = make_stack(tmp_path)
    assert not any("CUDA_VISIBLE_DEVICES" in child._environment for child in without.children)


def test_what_a_host_has_is_shared_out_unless_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert make_stack(tmp_path).children[-1].arguments[-4:] == ["--threads", "2", "--replicas-on-host", "2"]
    monkeypatch.setenv("RYZANSTEIN_THREADS", "3")
    monkeypatch.setenv("RYZANSTEIN_REPLICAS_ON_HOST", "5")
    assert not {"--threads", "--replicas-on-host"} & set(make_stack(tmp_path).children[-1].arguments)


def test_nobody_is_killed_while_it_may_still_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_DRAIN_GRACE", "120")
    monkeypatch.setenv("RYZANSTEIN_DRAIN_TIMEOUT", "70")
    stack = make_stack(tmp_path)
    assert stack._grace("executor") > 120
    assert 70 < stack._grace("gateway") < 120


async def test_beats_count_of_our_own_processes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_stack(tmp_path)
    monkeypatch.setattr(Child, "pid", property(lambda child: 100 if child.service == "gateway" else None))
    beat = Heartbeat("gateway", "gateway-0", 99, "ready", "127.0.0.1:7000")
    await stack._on_beat(beat)
    await stack._on_beat(Heartbeat("gateway", "gateway-1", 100, "ready"))
    assert stack.beats == {}
    ours = Heartbeat("gateway", "gateway-0", 100, "ready", "127.0.0.1:7001")
    await stack._on_beat(ours)
    assert stack.beats == {"gateway-0": ours}
    assert stack.gateway_url == "http://127.0.0.1:7001"
    assert stack._gateway_arguments(0)[-1] == "7001", "started again, it has the port that it had"


def test_a_gateway_is_ready_once_it_lists_the_model(tmp_path: Path) -> None:
    """A ring tells this process of itself before the health monitor tells the gateway."""
    stack = make_stack(tmp_path, served_model_name="m")
    gateway = next(child for child in stack.children if child.service == "gateway")
    for models, ready in (([], False), (["other"], False), (["m", "other"], True)):
        stack.beats["gateway-0"] = Heartbeat("gateway", "gateway-0", 1, "ready", models=models)
        assert stack._is_ready(gateway) is ready


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("[::1]:80", "[::1]:80"),
        ("name:80", "name:80"),
    ],
)
def test_where_a_server_is_reached(listens: str, reached: str) -> None:
    assert reachable(listens) == reached


def test_ipv6_hosts_have_brackets_before_a_port(tmp_path: Path) -> None:
    assert (bracketed("::1"), bracketed("[::1]"), bracketed("host")) == ("[::1]", "[::1]", "host")
    assert make_stack(tmp_path, host="::", port=80).gateway_url == "http://[::1]:80"


async def test_a_server_on_ipv6_says_where_it_is_in_brackets() -> None:
    try:
        sock = bind("::1", 0)
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    server = HttpServer(None, sock)
    assert server.address == f"[::1]:{sock.getsockname()[1]}"
    await server.stop()


# --- one child and its log -----------------------------------------------------------------------


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """A child that runs the module `tests.unit.cli.ends` with the arguments `1` (error) or nothing."""
    monkeypatch.setitem(MODULES, "gateway", "tests.unit.cli.ends")
    return Child("gateway", "gateway-0", ["1"], tmp_path / "gateway-0.log")


async def test_a_child_ends_with_its_own_sentence_and_not_with_that_of_an_earlier_one(child: Child) -> None:
    await child.start(os.environ)
    assert await child.wait() == 1
    assert child.last_error() == "The port is taken."
    child.arguments = []
    await child.start(os.environ)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert child.last_error() == f"The gateway was killed by SIGKILL; its log is {child.log}."
    assert child.log.read_text().count("The port is taken.") == 1, "what the earlier one said is still there"


def test_endings_in_words() -> None:
    assert [ending(code) for code in (3, -9, -250)] == [
        "ended with code 3",
        "was killed by SIGKILL",
        "was killed by signal 250",
    ]


def test_one_earlier_log_is_kept(tmp_path: Path) -> None:
    for run in ("first", "second"):
        (tmp_path / "gateway-0.log").write_text(run)
        set_aside(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"gateway-0.log.1": "second"}
    set_aside(tmp_path / "nowhere")

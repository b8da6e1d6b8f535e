"""A dump on a terminal: the verdict first, then each rank, its queues and blocks."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.commands import debug
from services.cli.commands.debug import print_dump, print_plans, print_profile
from services.cli.groups import app
from shared.config import CommonSettings
from shared.errors import ConfigurationError
from shared.messages.debugging import (
    DUMP_VERSION,
    AllocatorDump,
    CollectiveDump,
    Dump,
    HolderDump,
    LeaderDump,
    OperatorTime,
    PlanDump,
    PlanSequenceDump,
    PoolDump,
    ProfileSummary,
    QueuedDump,
    RankDump,
    StackDump,
    StepDump,
    ThreadDump,
)

RANK = RankDump(
    rank=1,
    pid=41,
    process="stopped",
    finished_step=7,
    in_flight=True,
    still_seconds=3.2,
    collective=CollectiveDump("all_reduce", 99, True, 4608, 3.1),
    steps=[StepDump(7, 5.0), StepDump(8, 3200.0, done=False, waited_ms=3.0)],
    stacks=[
        StackDump("pool_0", ["concurrent/futures/thread.py:81 _worker"]),
        StackDump("main", [f"[red]{n}" for n in range(20)]),
    ],
    threads=[ThreadDump(41, "python", "R", 1.0, 0.9, syscall="futex"), ThreadDump(42, "idle", "S", 0.0)],
    log=["last words"],
)
PLAN = PlanDump(8, 3.2, 0.0, 2, 2, 2, restores=1, sequence_count=2, blocks=9)
ALLOCATOR = AllocatorDump(
    16,
    PoolDump(8, 1, 2, 3, 2),
    PoolDump(0, 0, 0, 0, 0),
    1,
    0,
    4,
    2,
    8,
    3,
    0,
    0,
    1,
    [HolderDump("session", "s", 3)],
    "hold",
)
DUMP = Dump(
    DUMP_VERSION, "g", "m", "i", "host", 5, 0.0, 0.2, "Rank 1 is [b]stopped[/b].", "ready", ranks=[RANK], plans=[PLAN]
)


def shown(print_: object, *arguments: object) -> str:
    screen = Console(file=io.StringIO(), width=80)
    print_(*arguments, screen)  # type: ignore[operator]
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_verdict_is_the_first_line_as_it_stands() -> None:
    lines = shown(print_dump, DUMP).splitlines()
    assert lines[0] == "Rank 1 is [b]stopped[/b]."
    text = "\n".join(lines)
    assert "step 7 finished, in flight, still for 3.2 s" in text
    assert "collective all_reduce number 99, 4,608 bytes: in it for 3.100 s" in text
    assert "8 (3200.0 ms so far, 3.0 waited)" in text
    assert "its Python code does not answer" in text
    assert "thread 41 python: R, 90% of a core, in futex" in text
    assert "threads without work: pool_0" in text
    assert "[red]11" in text
    assert "... 8 more" in text
    assert "the leader did not answer" in text
    assert "not over: 2 tokens of 2 sequences (2 decode), 2 sampled, 9 blocks, 1 restores" in text


def test_queues_and_blocks_are_shown_where_the_leader_told() -> None:
    queue = [QueuedDump("gen-1", "r", "running", "batch", 1, 2.0, 10, 5, 14, 1, in_step=True)] * 20
    told = msgspec.structs.replace(DUMP, leader=LeaderDump(queue, {"running": 20}, ALLOCATOR, by_loop=False))
    text = shown(print_dump, told)
    assert "20 running; read beside an event loop that does not turn" in text
    assert "... 8 more" in text
    assert "writable: 2 used, 3 pinned, 2 cached, 1 empty of 8" in text
    assert "spilled: 3 of 8 in host memory" in text
    assert "largest: session s 3" in text
    assert "invariants: hold" in text


def test_slots_snapshots_and_what_layers_keep_are_shown() -> None:
    blocks = msgspec.structs.replace(
        ALLOCATOR,
        state_slots=12,
        state_slots_used=2,
        snapshots=3,
        snapshot_blocks=5,
        layers="6 recurrent (slot of 2400 values), 2 full (2x3x64)",
    )
    queue = [
        QueuedDump("gen-1", "r", "running", "batch", 1, 2.0, 10, 5, 14, 1, slot=7, snapshots=[4, 8]),
        QueuedDump("gen-2", "r", "waiting", "batch", 1, 2.0, 10, 5, 0, 0),
    ]
    told = msgspec.structs.replace(
        DUMP,
        leader=LeaderDump(queue, {}, blocks),
        plans=[msgspec.structs.replace(PLAN, snapshots=1, snapshot_saves=2, snapshot_loads=3)],
    )
    screen = Console(file=io.StringIO(), width=160)
    print_dump(told, screen)
    lines = [line.split() for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    ends = {line[0]: line[-2:] for line in lines if line and line[0].startswith("gen")}
    assert ends == {"generation": ["slot", "snapshots"], "gen-1": ["7", "2"], "gen-2": ["-", "0"]}
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "layers: 6 recurrent (slot of 2400 values), 2 full (2x3x64)" in text
    assert "recurrent state: 2 of 12 slots used, 3 snapshots kept in blocks, 5 blocks each" in text
    assert "1 restores, 1 snapshots, 2 saved snapshots, 3 loaded" in text


def test_plans_are_shown_with_their_sequences() -> None:
    one = PlanSequenceDump("gen-1", 1, 40, list(range(9)))
    plans = [msgspec.structs.replace(PLAN, sequences=[one])]
    text = shown(print_plans, msgspec.structs.replace(DUMP, plans=plans))
    assert "gen-1: 1 tokens, 40 in the cache, blocks 0 1 2 3 4 5 ... 9 in all" in text
    assert "has computed no step yet" in shown(print_plans, msgspec.structs.replace(DUMP, plans=[]))


def test_a_profile_is_a_table_per_rank() -> None:
    rows = [OperatorTime("aten::mm", 3, 1500.0, 2500.0, device_us=10.0)]
    found = [ProfileSummary(0, 5, 0.25, "t", rows, {"head": 0.002}), ProfileSummary(1, error="no step")]
    screen = Console(file=io.StringIO(), width=80)
    print_profile(found, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "Rank 0: 5 steps in 0.250 s" in text
    assert "aten::mm" in text
    assert "0.01" in text
    assert "native kernels, ms: head 2.0" in text
    assert "Rank 1: no step." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3", "--seconds", "2"], "exclude each other"),
        (["--ranks", "0,x"], "--ranks cannot be '0,x'"),
        (["--ranks", "-1"], "--ranks cannot be '-1'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["debug", "profile", "g", *arguments])
    assert isinstance(result.exception, ConfigurationError)
    assert message in str(result.exception)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an executor tells, without one."""

    async def dump(*_: object) -> Dump:
        return msgspec.structs.replace(DUMP, plans=[PLAN])

    async def profile(*_: object) -> list[ProfileSummary]:
        return [ProfileSummary(0, 5, trace="rank-0"), ProfileSummary(1, error="no step")]

    monkeypatch.setattr(debug, "nats_of_stack", lambda *_: CommonSettings())
    monkeypatch.setattr(debug, "fetch_dump", dump)
    monkeypatch.setattr(debug, "fetch_profile", profile)


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dump", "g"], "Rank 1 is [b]stopped[/b].\n"),
        (["dump", "g", "--json"], '{"version":'),
        (["plans", "g"], "step 8"),
        (["plans", "g", "--json"], '[{"step":8'),
        (["profile", "g", "--ranks", "0, 1", "--output", "traces"], "traces/rank-0\n"),
    ],
)
def test_what_is_fetched_is_shown(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["debug", *arguments])
    assert result.exit_code == 0, result.exception
    assert said in result.output


@pytest.mark.usefixtures("fetched")
def test_a_dump_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    wrong = str(tmp_path / "none" / "file")
    result = CliRunner().invoke(app, ["debug", "dump", "g", "--output", wrong])
    assert isinstance(result.exception, ConfigurationError)
    assert f"cannot be written to {wrong}" in str(result.exception)

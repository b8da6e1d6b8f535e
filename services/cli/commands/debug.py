"""`ryzanstein debug`: asks a group's supervisor, waits, fetches what there is, and shows it, the most important
first.
"""

import asyncio
import gzip
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from services.cli.target import AsJson, DataDir, NatsUrl, known_group, nats_of_stack
from services.cli.ui import console, print_json, say
from shared.config import CommonSettings
from shared.errors import BrokerUnavailable, ConfigurationError, DeadlineExceeded, NobodyThere
from shared.messages import GroupRecord
from shared.messages.debugging import (
    AllocatorDump,
    DebugCommand,
    Dump,
    DumpCommand,
    FetchCommand,
    JobReply,
    LeaderDump,
    Piece,
    PlanDump,
    ProfileCommand,
    ProfileSummary,
    RankDump,
    ResultCommand,
    StackDump,
    StepDump,
)
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket

debug_app = typer.Typer(
    help="Inspect a group's ring: what its ranks do, even when it hangs (docs/debugging.md).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Group = Annotated[str, typer.Argument(help="The group, as `ryzanstein status` names it. Default: the only one.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the answer.", min=1, max=600)]


@debug_app.command()
def dump(
    group: Group = "",
    output: Annotated[
        Path | None, typer.Option(help="Write all of it there, as JSON.", dir_okay=False, metavar="FILE")
    ] = None,
    json: AsJson = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for ranks that do not answer.", min=0, max=30)] = 1.0,
    timeout: Timeout = 30.0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show what every rank does: stacks, step and collective under way, queues, KV blocks, last plans.

    The supervisor process answers, so it works for a ring that is hung, loading or lost. The first line names the
    rank that is behind, if one is. Neither prompts nor tokens are shown. Nothing is stopped by it.
    """
    found = asyncio.run(fetch_dump(nats_of_stack(data_dir, nats_url), group, wait, timeout))
    if output is not None:
        _write(output, found)
    if json:
        print_json(found)
    elif output is None:
        print_dump(found, console())
    else:
        screen = console()
        say(screen, found.verdict)
        say(screen, f"The whole dump is in {output}.")


@debug_app.command()
def plans(
    group: Group = "", json: AsJson = False, timeout: Timeout = 30.0, data_dir: DataDir = None, nats_url: NatsUrl = ""
) -> None:
    """Show the last step plans: tokens, sequences and KV blocks of each step, and how long it took."""
    found = asyncio.run(fetch_dump(nats_of_stack(data_dir, nats_url), group, 0.0, timeout))
    if json:
        print_json(found.plans)
    else:
        print_plans(found, console())


@debug_app.command()
def profile(
    group: Group = "",
    steps: Annotated[int | None, typer.Option(help="Steps to profile.", min=1, max=500, show_default="20")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds to profile, instead of --steps.", min=0.1, max=60)
    ] = None,
    ranks: Annotated[str, typer.Option(help="Which ranks: all, or numbers with commas.")] = "all",
    memory: Annotated[bool, typer.Option("--memory", help="Also record allocations; slower.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the traces.", file_okay=False, metavar="DIR", show_default="./profile-GROUP-TIME"
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the steps.", min=1, max=600)] = 60.0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Profile the next steps with torch's profiler while the group serves; the traces are for ui.perfetto.dev.

    Requests must be running: a ring without work computes no steps. The group is slower meanwhile.
    """
    if steps is not None and seconds is not None:
        raise ConfigurationError("--steps and --seconds exclude each other; give one of them.")
    command = ProfileCommand(
        steps=0 if seconds is not None else steps or 20,
        seconds=seconds or 0.0,
        ranks=_numbers(ranks),
        memory=memory,
        timeout=timeout,
    )
    directory = output or Path(f"profile-{group}-{time.strftime('%Y%m%dT%H%M%S')}".replace("/", "_"))
    screen = console()
    with screen.status(f"{group}: profiling") as progress:
        found = asyncio.run(
            fetch_profile(nats_of_stack(data_dir, nats_url), group, command, directory, progress.update)
        )
    print_profile(found, screen)
    for summary in found:
        if summary.trace:
            say(screen, f"{directory / summary.trace}")


def _numbers(ranks: str) -> list[int]:
    if ranks == "all":
        return []
    numbers = [part.strip() for part in ranks.split(",")]
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise ConfigurationError(f"--ranks cannot be {ranks!r}; it is all, or numbers with commas such as 0,1.")
    return [int(number) for number in numbers]


def _write(path: Path, found: Dump) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    except OSError as error:
        raise ConfigurationError(
            f"The dump cannot be written to {path} ({error.strerror}); name another file with --output."
        ) from None


ANSWER_TIMEOUT = 5.0  # seconds that a supervisor has to answer a command: it does so at once
POLL = 0.1
WRITE_TIME = 90.0  # seconds that ranks may take to write a profile, beyond the time-out of the profile itself
MOST_BYTES = 1 << 30  # of one file


async def fetch_dump(settings: CommonSettings, group: str, wait: float, timeout: float) -> Dump:
    """`wait`: seconds for ranks that do not answer. Raises `ConfigurationError`, `BrokerUnavailable`,
    `DeadlineExceeded`."""
    async with Bus.session(settings, "ryzanstein debug") as bus:
        executor = await _Executor.of(bus, group)
        reply = await executor.run(DumpCommand(wait), timeout)
        data = await executor.fetch(reply.job, "dump.json.gz", reply.files[0].size)
    return msgspec.json.decode(gzip.decompress(data), type=Dump)


async def fetch_profile(
    settings: CommonSettings, group: str, command: ProfileCommand, output: Path, report: Callable[[str], object]
) -> list[ProfileSummary]:
    """Traces go to the directory `output`, which is made. `report` is told how it goes. Raises as `fetch_dump`."""
    async with Bus.session(settings, "ryzanstein debug") as bus:
        executor = await _Executor.of(bus, group)
        reply = await executor.run(command, command.timeout + WRITE_TIME)
        _make(output)
        found: list[ProfileSummary] = []
        for file in reply.files:
            report(f"fetching {file.name} ({file.size / 1e6:.1f} MB)")
            data = await executor.fetch(reply.job, file.name, file.size)
            if file.name == "summary.json":
                found = msgspec.json.decode(data, type=list[ProfileSummary])
            else:
                (output / Path(file.name).name).write_bytes(data)
    return found


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"The directory {directory} cannot be made ({error.strerror}); name another with --output."
        ) from None


class _Executor:
    def __init__(self, bus: Bus, group: str) -> None:
        self._bus = bus
        self._group = group

    @classmethod
    async def of(cls, bus: Bus, group: str) -> "_Executor":
        """That of `group`, or of the one group that there is where none is named. Raises `ConfigurationError`."""
        if group:
            return cls(bus, group)
        records = await (await Bucket.open(bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        present = sorted(name for name, record in records.items() if record.state != "gone")
        if len(present) == 1:
            return cls(bus, present[0])
        names = f"the groups are: {', '.join(present)}" if present else "there is none at the moment"
        raise ConfigurationError(f"Name a group; {names}.")

    async def run(self, command: DebugCommand, timeout: float) -> JobReply:
        """Has the work done, and waits for it. Raises what `_ask` does, and `DeadlineExceeded`."""
        reply = await self._ask(command)
        give_up = time.monotonic() + timeout
        while not reply.done:
            if time.monotonic() >= give_up:
                raise DeadlineExceeded(
                    f"The executor of the group {self._group} has not finished within {timeout:g} s; try again, "
                    "with a larger --timeout."
                )
            await asyncio.sleep(POLL)
            reply = await self._ask(ResultCommand(reply.job))
        return reply

    async def _ask(self, command: DebugCommand) -> JobReply:
        subject = subjects.debug(self._group)
        try:
            reply = await self._bus.request(subject, command, JobReply, timeout=ANSWER_TIMEOUT)
        except NobodyThere:
            raise await self._absence() from None
        except BrokerUnavailable:
            raise BrokerUnavailable(
                f"The executor of the group {self._group} does not answer; its supervisor is stopped or the host "
                "is overloaded: look at the process itself (`ryzanstein status` has its pid)."
            ) from None
        if reply.error:
            raise ConfigurationError(reply.error)
        return reply

    async def _absence(self) -> ConfigurationError:
        """Why nobody listens."""
        records = await (await Bucket.open(self._bus, subjects.GROUPS_BUCKET, GroupRecord)).items()
        record = known_group(records, self._group)
        return ConfigurationError(
            f"The executor of the group {self._group} ({record.state}) is not there; see its log for why it ended."
        )

    async def fetch(self, job: str, name: str, size: int) -> bytes:
        """One file of a job that is done. Raises `BrokerUnavailable` where it is gone."""
        if size > MOST_BYTES:
            raise ConfigurationError(f"{name} has {size:,} bytes; profile fewer steps or ranks.")
        data = bytearray()
        while len(data) < size:
            command = FetchCommand(job, name, len(data))
            piece = await self._bus.request(subjects.debug(self._group), command, Piece, timeout=ANSWER_TIMEOUT)
            if not piece.data:
                raise BrokerUnavailable(f"The executor does not have {name} any more; ask again.")
            data += piece.data
        return bytes(data)


FRAMES = 12  # of a stack that are shown; the file has all
QUEUED = 12
PLANS = 8
BLOCKS = 6
LINES = 6


def print_dump(dump: Dump, screen: Console) -> None:
    """The verdict, then what it rests on."""
    say(screen, dump.verdict, "bold")
    for line in _lines(dump):
        heading = bool(line) and not line.startswith(" ")
        say(screen, line, "bold" if heading else None)


def print_plans(dump: Dump, screen: Console) -> None:
    """The last plans, with their sequences."""
    if not dump.plans:
        say(screen, f"{dump.group} has computed no step yet.")
    for plan in dump.plans:
        say(screen, _plan(plan).strip(), "bold")
        for one in plan.sequences:
            more = f" ... {len(one.blocks)} in all" if len(one.blocks) > BLOCKS else ""
            blocks = " ".join(map(str, one.blocks[:BLOCKS])) + more
            name = one.generation_id or "(not kept)"
            say(screen, f"  {name}: {one.tokens} tokens, {one.context} in the cache, blocks {blocks}")


def print_profile(found: Sequence[ProfileSummary], screen: Console, rows: int = 15) -> None:
    """The top operators of each rank."""
    for summary in found:
        if summary.error:
            say(screen, f"Rank {summary.rank}: {summary.error}.", "bold")
            continue
        say(screen, f"Rank {summary.rank}: {summary.steps} steps in {summary.seconds:.3f} s", "bold")
        gpu = any(row.device_us for row in summary.operators)
        memory = any(row.memory_bytes for row in summary.operators)
        columns = ["operator", "calls", "self ms", "total ms", *(["GPU ms"] * gpu), *(["MB"] * memory)]
        table = [columns]
        for row in summary.operators[:rows]:
            cells = [row.name[:60], str(row.calls), f"{row.self_us / 1e3:.2f}", f"{row.total_us / 1e3:.2f}"]
            cells += [f"{row.device_us / 1e3:.2f}"] * gpu + [f"{row.memory_bytes / 1e6:.2f}"] * memory
            table.append(cells)
        for line in _table(table):
            say(screen, line)
        if summary.native:
            parts = sorted(summary.native.items(), key=lambda part: -part[1])
            told = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts)
            say(screen, f"  native kernels, ms: {told}")


# --- a dump, line by line ------------------------------------------------------------------------


def _lines(dump: Dump) -> Iterator[str]:
    at = datetime.fromtimestamp(dump.taken_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"  {dump.group} ({dump.model}) on {dump.host}, ring {dump.epoch}, {dump.state}, {at}, took {dump.took:.2f} s"
    if dump.reason:
        yield f"  taken because {dump.reason}"
    for rank in dump.ranks:
        yield from _rank(rank)
    if dump.leader is not None:
        yield from _leader(dump.leader)
    elif dump.ranks:
        yield ""
        yield "Queues and KV blocks"
        load = dump.load
        yield "  the leader did not answer; the board has: " + ", ".join(
            f"{name} {load[name]:g}" for name in ("running", "waiting", "free_blocks", "total_blocks") if name in load
        )
    if dump.plans:
        yield ""
        yield "Last plans"
        yield from map(_plan, dump.plans[-PLANS:])
    yield ""
    yield "Versions"
    yield "  " + ", ".join(f"{name} {version}" for name, version in dump.versions.items())


def _rank(rank: RankDump) -> Iterator[str]:
    yield ""
    yield f"Rank {rank.rank} (process {rank.pid}): {rank.process}"
    still = f", still for {rank.still_seconds:.1f} s" if rank.in_flight and rank.still_seconds >= 0.5 else ""
    flight = "in flight" if rank.in_flight else "none in flight"
    memory = f"{rank.memory_bytes / (1 << 20):.0f} MiB"
    yield f"  step {rank.finished_step} finished, {flight}{still}; {rank.layers} layers counted; {memory}"
    if rank.collective is not None:
        at = rank.collective
        state = f"in it for {at.seconds:.3f} s" if at.in_flight else f"left; entered {at.seconds:.3f} s ago"
        yield f"  collective {at.name} number {at.number}, {at.bytes:,} bytes: {state}"
    if rank.steps:
        yield f"  last steps: {', '.join(map(_step, rank.steps[-4:]))}"
    if not rank.answered and rank.process != "ended":
        yield "  its Python code does not answer"
    for thread in rank.threads:
        if thread.busy >= 0.05 or thread.state in "RD":
            where = f", in {thread.syscall or thread.wchan}" if thread.syscall or thread.wchan else ""
            yield f"  thread {thread.tid} {thread.name}: {thread.state}, {thread.busy:.0%} of a core{where}"
    yield from _stacks(rank)
    if rank.log:
        yield "  last log lines"
        yield from (f"    {line[:200]}" for line in rank.log[-LINES:])


def _stacks(rank: RankDump) -> Iterator[str]:
    if rank.stacks_missing:
        yield f"  no stacks: {rank.stacks_missing}"
    idle = [stack.thread for stack in rank.stacks if _is_idle(stack)]
    if idle:
        yield f"  threads without work: {', '.join(idle)}"
    for stack in rank.stacks:
        if _is_idle(stack):
            continue
        yield f"  thread {stack.thread}"
        yield from (f"    {frame}" for frame in stack.frames[:FRAMES])
        if len(stack.frames) > FRAMES:
            yield f"    ... {len(stack.frames) - FRAMES} more"


def _is_idle(stack: StackDump) -> bool:
    """Whether it is a pool's thread that waits for work, or the one that waits for the supervisor's word."""
    return bool(stack.frames) and stack.frames[0].endswith((" _worker", " _listen"))


def _step(step: StepDump) -> str:
    state = f"{step.ms:.1f} ms" if step.done else f"{step.ms:.1f} ms so far"
    waited = f", {step.waited_ms:.1f} waited" if step.waited_ms else ""
    return f"{step.step} ({state}{waited})"


def _leader(leader: LeaderDump) -> Iterator[str]:
    yield ""
    yield "Queues"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(leader.counts.items()) if " " not in name)
    yield f"  {counts or 'empty'}" + ("" if leader.by_loop else "; read beside an event loop that does not turn")
    if leader.queues:
        blocks = leader.allocator
        recurrent = blocks is not None and bool(blocks.state_slots)
        head = ["generation", "state", "lane", "attempt", "age s", "prompt", "output"]
        head += ["computed", "blocks"] if blocks is not None else []
        table = [[*head, *(("slot", "snapshots") if recurrent else ())]]
        for one in leader.queues[:QUEUED]:
            state = f"{one.state}, in step" if one.in_step else one.state
            numbers = [one.prompt_tokens, one.output_tokens]
            numbers += [one.computed, one.blocks] if blocks is not None else []
            row = [one.generation_id, state, one.lane, str(one.attempt), f"{one.age:.1f}", *map(str, numbers)]
            if recurrent:
                row += [str(one.slot) if one.slot >= 0 else "-", str(len(one.snapshots))]
            table.append(row)
        yield from _table(table)
        if len(leader.queues) > QUEUED:
            yield f"  ... {len(leader.queues) - QUEUED} more"
    if leader.allocator is not None:
        yield from _blocks(leader.allocator)


def _blocks(blocks: AllocatorDump) -> Iterator[str]:
    yield ""
    yield f"KV blocks of {blocks.block_size} tokens"
    if blocks.layers:
        yield f"  layers: {blocks.layers}"
    for name, pool in (("writable", blocks.writable), ("quantized", blocks.quantized)):
        if pool.total:
            yield (
                f"  {name}: {pool.used} used, {pool.pinned} pinned, {pool.cached} cached, {pool.empty} empty "
                f"of {pool.total}"
            )
    if blocks.host_slots or blocks.disk_slots:
        host = f"{blocks.host_used} of {blocks.host_slots} in host memory"
        yield f"  spilled: {host}, {blocks.disk_used} of {blocks.disk_slots} on disk"
    if blocks.state_slots:
        used = f"{blocks.state_slots_used} of {blocks.state_slots} slots used"
        each = f", {blocks.snapshot_blocks} blocks each" if blocks.snapshot_blocks else ""
        yield f"  recurrent state: {used}, {blocks.snapshots} snapshots kept in blocks{each}"
    yield (
        f"  {blocks.private} being filled, {blocks.shared} shared, {blocks.promised} promised to what runs, "
        f"{blocks.reserve} kept in reserve; {blocks.sessions} sessions have blocks pinned"
    )
    if blocks.holders:
        yield "  largest: " + ", ".join(f"{one.kind} {one.name} {one.blocks}" for one in blocks.holders[:5])
    yield f"  invariants: {blocks.invariants}"


def _plan(plan: PlanDump) -> str:
    copies = (("saves", plan.saves), ("compressions", plan.compressions), ("restores", plan.restores))
    states = (("snapshots", plan.snapshots), ("saved snapshots", plan.snapshot_saves), ("loaded", plan.snapshot_loads))
    extra = "".join(f", {count} {name}" for name, count in (*copies, ("pools", plan.pools), *states) if count)
    took = f"{plan.ms:.1f} ms" if plan.ms else "not over"
    return (
        f"  step {plan.step}, {plan.age:.2f} s ago, {took}: {plan.tokens} tokens of {plan.sequence_count} sequences "
        f"({plan.decodes} decode), {plan.sampled} sampled, {plan.blocks} blocks{extra}"
    )


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *numbers = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in numbers)]
        yield "  " + "  ".join(cells).rstrip()


def add_to(app: typer.Typer) -> None:
    app.add_typer(debug_app, name="debug")

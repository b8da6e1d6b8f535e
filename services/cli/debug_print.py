"""How a dump, its plans and a profile look on a terminal. The most important comes first."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Console

from shared.messages.debugging import (
    AllocatorDump,
    Dump,
    LeaderDump,
    PlanDump,
    ProfileSummary,
    RankDump,
    StackDump,
    StepDump,
)

FRAMES = 12
"""Of a stack that are shown; the file has all."""
QUEUED = 12
PLANS = 8
BLOCKS = 6
LINES = 6


def print_dump(dump: Dump, screen: Console) -> None:
    """The verdict, then what it rests on."""
    _say(screen, dump.verdict, style="bold")
    for line in _lines(dump):
        heading = bool(line) and not line.startswith(" ")
        _say(screen, line, style="bold" if heading else None)


def print_plans(dump: Dump, screen: Console) -> None:
    """The last plans, with their sequences."""
    if not dump.plans:
        _say(screen, f"{dump.group} has computed no step yet.")
    for plan in dump.plans:
        _say(screen, _plan(plan).strip(), style="bold")
        for one in plan.sequences:
            more = f" ... {len(one.blocks)} in all" if len(one.blocks) > BLOCKS else ""
            blocks = " ".join(map(str, one.blocks[:BLOCKS])) + more
            name = one.generation_id or "(not kept)"
            _say(screen, f"  {name}: {one.tokens} tokens, {one.context} in the cache, blocks {blocks}")


def print_profile(found: Sequence[ProfileSummary], screen: Console, rows: int = 15) -> None:
    """The top operators of each rank."""
    for summary in found:
        if summary.error:
            _say(screen, f"Rank {summary.rank}: {summary.error}.", style="bold")
            continue
        _say(screen, f"Rank {summary.rank}: {summary.steps} steps in {summary.seconds:.3f} s", style="bold")
        gpu = any(row.device_us for row in summary.operators)
        memory = any(row.memory_bytes for row in summary.operators)
        columns = ["operator", "calls", "self ms", "total ms", *(["GPU ms"] * gpu), *(["MB"] * memory)]
        table = [columns]
        for row in summary.operators[:rows]:
            cells = [row.name[:60], str(row.calls), f"{row.self_us / 1e3:.2f}", f"{row.total_us / 1e3:.2f}"]
            cells += [f"{row.device_us / 1e3:.2f}"] * gpu + [f"{row.memory_bytes / 1e6:.2f}"] * memory
            table.append(cells)
        for line in _table(table):
            _say(screen, line)
        if summary.native:
            parts = sorted(summary.native.items(), key=lambda part: -part[1])
            told = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts)
            _say(screen, f"  native kernels, ms: {told}")


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
        yield "  the leader could not tell; the board has: " + ", ".join(
            f"{name} {load[name]:g}"
            for name in ("running", "waiting", "free_blocks", "total_blocks")
            if name in load
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
    """Whether it is a pool's thread that waits for work, or the one that waits for the orchestrator's word."""
    return bool(stack.frames) and stack.frames[0].endswith((" _worker", " _listen"))


def _step(step: StepDump) -> str:
    state = f"{step.ms:.1f} ms" if step.done else f"{step.ms:.1f} ms so far"
    waited = f", {step.waited_ms:.1f} waited" if step.waited_ms else ""
    return f"{step.step} ({state}{waited})"


def _leader(leader: LeaderDump) -> Iterator[str]:
    yield ""
    yield "Queues"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(leader.counts.items()) if " " not in name)
    yield f"  {counts or 'empty'}" + (
        "" if leader.by_loop else "; read beside an event loop that does not turn"
    )
    if leader.queues:
        table = [
            ["generation", "state", "lane", "attempt", "age s", "prompt", "output", "computed", "blocks"]
        ]
        for one in leader.queues[:QUEUED]:
            state = f"{one.state}, in step" if one.in_step else one.state
            numbers = (one.prompt_tokens, one.output_tokens, one.computed, one.blocks)
            row = [one.generation_id, state, one.lane, str(one.attempt), f"{one.age:.1f}", *map(str, numbers)]
            table.append(row)
        yield from _table(table)
        if len(leader.queues) > QUEUED:
            yield f"  ... {len(leader.queues) - QUEUED} more"
    yield from _blocks(leader.allocator)


def _blocks(blocks: AllocatorDump) -> Iterator[str]:
    yield ""
    yield f"KV blocks of {blocks.block_size} tokens"
    for name, pool in (("hot", blocks.hot), ("cold", blocks.cold)):
        if pool.total:
            yield (
                f"  {name}: {pool.used} used, {pool.pinned} pinned, {pool.cached} cached, {pool.empty} empty "
                f"of {pool.total}"
            )
    if blocks.host_slots or blocks.disk_slots:
        host = f"{blocks.host_used} of {blocks.host_slots} in host memory"
        yield f"  spilled: {host}, {blocks.disk_used} of {blocks.disk_slots} on disk"
    yield (
        f"  {blocks.private} being filled, {blocks.shared} shared, {blocks.promised} promised to what runs, "
        f"{blocks.reserve} kept in reserve; {blocks.sessions} sessions have blocks pinned"
    )
    if blocks.holders:
        yield "  largest: " + ", ".join(f"{one.kind} {one.name} {one.blocks}" for one in blocks.holders[:5])
    yield f"  invariants: {blocks.invariants}"


def _plan(plan: PlanDump) -> str:
    copies = (("saves", plan.saves), ("compressions", plan.compressions), ("restores", plan.restores))
    extra = "".join(f", {count} {name}" for name, count in (*copies, ("pools", plan.pools)) if count)
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


def _say(screen: Console, text: str, style: str | None = None) -> None:
    screen.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

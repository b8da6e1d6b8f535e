"""What is not in memory: `python -m benchmarks.engine.beyond_memory MODEL_DIRECTORY`.

Restored blocks    steps that bring a sequence's keys and values back from disk, before the forward pass and beside it
Streamed weights   tokens/s of one sequence with parts of the weights in memory, beside what the disk allows
Mapped blocks      steps of sparse attention (`pages`) whose blocks lie in a file: all of it in memory, or none

One rank, the native kernels. All read from the disk itself: what a step has read leaves the page cache behind it.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from benchmarks.engine.kv_decode import Long
from benchmarks.engine.steps import BLOCK, Decode, decode_plan, load_one_rank, prefill_plan
from benchmarks.harness import CORES, ModelDirectory, Rounds, Sheet, Threads, in_turns, run, show, timed
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.cpu.block_fetching import FetchSteps, disk_reads
from services.executor.kv_cache.block_memory import MappedFiles
from shared.messages import SparseAttention

if TYPE_CHECKING:
    from services.executor.worker.runner import ModelRunner
    from services.executor.worker.weights import Share

_SECTOR = 512
"""Bytes of what the system counts as one block that was read."""
SHARES = (0.75, 0.5, 0.25)
"""Of the weights, in memory."""
CONTEXT = 128
PROMPTS = (32, 64, 128, 256)
"""Tokens of prompts whose steps restore the blocks of another sequence."""


def seconds(before: Callable[[], object], work: Callable[[], object], rounds: int) -> float:
    """Median of `work`, each behind a `before` that does not count."""
    times = []
    for _ in range(rounds):
        before()
        times.append(timed(work)())
    return statistics.median(times)


# --- restored blocks -----------------------------------------------------------------------------


def measure_restores(directory: Path, scratch: Path, tokens: int, threads: int, rounds: int) -> Sheet:
    """Milliseconds of steps of one token, and of prompts, that restore `tokens` tokens' blocks."""
    blocks = -(-tokens // BLOCK)
    runner, store = load_one_rank(directory, "bf16", threads, blocks + 16, "int8")
    from services.executor.collectives.base import SingleRank
    from services.executor.kv_cache.offload import BlockCopier, DiskSlots, SpillStore

    class UncachedDisk(DiskSlots):
        def forget(self) -> None:
            """What is in the page cache."""
            os.fsync(self._file)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    spill = SpillStore(0, 0, store.shape.bytes_per_spilled_block)
    spill.disk = disk = UncachedDisk(store.shape.bytes_per_spilled_block, scratch, 1 << 30)
    steps = Decode(1, tokens).steps(store.num_hot, store.num_cold)
    for plan in steps.before:
        runner.forward(plan)
    full = as_int32(steps.measured.block_tables)[:-1].tolist()
    saves = to_bytes([(block, slot) for slot, block in enumerate(full)])
    restores = to_bytes([(slot, block) for slot, block in enumerate(full)])
    runner._copier = copier = BlockCopier(store, spill, SingleRank())  # noqa: SLF001
    copier.run(structs.replace(steps.measured, saves=saves))
    disk.flush()
    plans = {
        "a token of the restored sequence": steps.measured,
        "a token of another one": decode_plan(1, CONTEXT),
        **{f"a prompt of {n} tokens": prefill_plan(n) for n in PROMPTS},
    }
    rows = []
    for name, plan in plans.items():
        restoring = structs.replace(plan, restores=restores)

        def restored(beside: bool, plan: StepPlan = restoring) -> float:
            spill.beside = beside
            disk.forget()
            return timed(partial(runner.forward, plan))()

        work = {
            "alone": timed(partial(runner.forward, plan)),
            "before": partial(restored, False),
            "beside": partial(restored, True),
        }
        found = in_turns(work, rounds)
        rows.append((name, *(f"{statistics.median(found[way]) * 1e3:.1f}" for way in work)))
    disk.close()
    title = f"ms, {len(full)} blocks of {store.shape.bytes_per_spilled_block:,} bytes"
    return Sheet((title, "alone", "before", "beside"), rows)


# --- mapped blocks -------------------------------------------------------------------------------


class _Quiet(FetchSteps):
    """No step asks for anything."""

    def next(self, read: int) -> int:
        return 0


class _Asking(FetchSteps):
    """Each step does."""

    def next(self, read: int) -> int:
        return super().next(self._read + 1)


def measure_pages(directory: Path, scratch: Path, tokens: int, threads: int, rounds: int) -> Sheet:
    """Milliseconds of steps of one sequence of `tokens` tokens, and what each reads from disk."""
    sparse = SparseAttention()
    if tokens <= sparse.threshold:
        sparse = structs.replace(sparse, threshold=tokens // 4, recent=tokens // 8, budget=tokens // 8)
    rows = []

    def add(name: str, long: Long, before: Callable[[], object], tokens_of_steps: Iterable[int]) -> None:
        coming = iter(tokens_of_steps)
        read = disk_reads()
        taken = seconds(before, lambda: long.forward(tokens, next(coming)), rounds)
        megabytes = (disk_reads() - read) * _SECTOR / rounds / 1e6
        rows.append((name, f"{taken * 1e3:.1f}", f"{megabytes:.1f}"))

    in_memory = Long(directory, threads, tokens, sparse)
    in_memory.forward(tokens, 0)
    add("in memory", in_memory, lambda: None, repeat(0))
    del in_memory
    files = MappedFiles(scratch)
    mapped = Long(directory, threads, tokens, sparse, files)
    native = mapped.runner.native
    assert native is not None, "the native kernels compute it"
    files.drop()
    mapped.forward(tokens, 0)
    native._fetches = _Quiet()  # noqa: SLF001
    add("in a file, in memory", mapped, lambda: None, repeat(0))
    add("on disk, page faults alone", mapped, files.drop, repeat(0))
    native._fetches = _Asking()  # noqa: SLF001
    mapped.forward(tokens, 0)
    add("on disk, asked for ahead", mapped, files.drop, repeat(0))
    add("on disk, other pages in each step", mapped, files.drop, count(1))
    return Sheet((f"blocks of {tokens:,} tokens", "ms", "MB read a step"), rows)


# --- streamed weights ----------------------------------------------------------------------------


def measure_weights(directory: Path, scratch: Path, threads: int, rounds: int) -> Sheet:
    """Tokens/s of one sequence. A share that is below what a rank needs at least is left out."""
    from shared.errors import ConfigurationError

    whole = _share(directory, scratch, threads, 0)
    packed = sum(file.stat().st_size for file in scratch.glob("*.packed"))
    rows = [("all", f"{packed:,}", "0", "", "", f"{_speed(whole, threads, rounds):.2f}")]
    for share in SHARES:
        try:
            found = _share(directory, scratch, threads, int(packed * share))
        except ConfigurationError as error:
            typer.echo(f"{share:.0%}: {error}", err=True)
            break
        told = found.streamed
        assert told is not None, "they do not fit"
        numbers = (f"{told.memory:,}", f"{told.per_step:,}", f"{told.disk_rate / 1e6:,.0f}")
        speed = f"{_speed(found, threads, rounds):.2f}"
        rows.append((f"{share:.0%}", *numbers, f"{told.tokens_per_second:.2f}", speed))
    head = ("weights in memory", "bytes", "read a step", "disk, MB/s", "it allows", "tokens/s")
    return Sheet(head, rows)


def _share(directory: Path, scratch: Path, threads: int, memory: int) -> "Share":
    import torch

    from services.executor.collectives.base import SingleRank
    from services.executor.core.settings import ExecutorSettings
    from services.executor.ipc.rank_pipe import RankSpec
    from services.executor.worker.weights import load_share
    from shared.config import load_settings

    cache = {"weight_cache_directory": scratch, "weight_cache_bytes": 1 << 40}
    settings = load_settings(ExecutorSettings, threads=threads, weights_memory=memory, **cache)
    spec = RankSpec(0, 1, "bench", "bench", 1, "", {})
    where = (directory, torch.device("cpu"), SingleRank(), lambda done, total: None)
    share = load_share(settings, spec, *where)
    if not share.is_cached:
        share.keep(_runner(share).packed)
        share.settle()
        while not any(scratch.glob("*.packed")):
            time.sleep(0.1)
        share = load_share(settings, spec, *where)
    return share


def _runner(share: "Share") -> "ModelRunner":
    import torch

    from services.executor.core.settings import ExecutorSettings
    from services.executor.kv_cache.capacity import store_shape
    from services.executor.kv_cache.offload import SpillStore
    from services.executor.kv_cache.store import KvStore

    shape = store_shape(ExecutorSettings(block_size=BLOCK), "bf16", share.facts.states, torch.bfloat16)
    store = KvStore(shape, CONTEXT // BLOCK, torch.device("cpu"), num_slots=2 if shape.slot else 0)
    return share.runner(store, SpillStore(0, 0, shape.bytes_per_spilled_block), None)


def _speed(share: "Share", threads: int, rounds: int) -> float:
    runner = _runner(share)
    plan = decode_plan(1, CONTEXT)
    runner.forward(plan)
    return 1 / seconds(lambda: None, lambda: runner.forward(plan), rounds)


def main(
    model: ModelDirectory,
    tokens: Annotated[int, typer.Option(help="Tokens whose blocks are restored.", min=2 * BLOCK)] = 2048,
    context: Annotated[
        int, typer.Option(help="Tokens of the sequence whose blocks are mapped.", min=8 * BLOCK)
    ] = 65536,
    threads: Threads = CORES,
    rounds: Rounds = 10,
    scratch: Annotated[Path | None, typer.Option(help="A directory on the disk that is measured.")] = None,
) -> None:
    """Steps that read blocks or weights from disk."""
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        show(measure_restores(model, Path(place), tokens, threads, rounds))
        show(measure_pages(model, Path(place), context, threads, rounds))
        show(measure_weights(model, Path(place), threads, rounds))


if __name__ == "__main__":
    run(main)

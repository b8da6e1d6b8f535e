"""One rank of a ring without NATS and supervisor, which shows at its end what its KV blocks hold.

`python -m tests.integration.executor.ring_member RANK DIRECTORY`: the engine, the plan channel and the
collectives are the production ones; the directory holds the model, the settings and the requests. Standard
input and output take the supervisor's part: where the ring meets, and the tokens of each step.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog
import torch

from services.executor.core.engine import Launched, RestoreFailed
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.kv_cache.store import KvStore
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.steps import SampledRow
from services.executor.worker import engine as ring_engine
from services.executor.worker import storage
from shared.messages import GenerationRequest, TokenEntry


class Turn(msgspec.Struct):
    """A request, and what its session says after the answer, until it has nothing more to say."""

    request: GenerationRequest
    later: list[list[int]] = []


class Known(msgspec.Struct):
    """What the leader takes for granted: the tokens up to the end of each full block."""

    blocks: dict[int, list[int]]
    copies: list[int]
    """Saves, compressions and restores that the plans carried."""
    recovered: int
    """Blocks that the ring had on disk when it started."""


stores: list[KvStore] = []


class ShownStore(KvStore):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        stores.append(self)


def say(message: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def lead(settings: ExecutorSettings, spec: RankSpec, board: RingBoard, directory: Path) -> None:
    engine = ring_engine.RingEngine(settings, spec, board, say)
    engine_spec = engine.load(lambda done, total: None)
    limits = BatchSettings(settings.max_batch_tokens, settings.max_sequences, session_ttl=100.0)
    batcher = Scheduler(engine_spec, limits, "m")
    recovered = batcher.recover(engine.recovered())
    turns = msgspec.json.decode((directory / "turns.json").read_bytes(), type=list[Turn])
    load = {turn.request.generation_id: turn for turn in turns}
    answers = {name: list(turn.request.generated) for name, turn in load.items()}
    for turn in turns:
        assert batcher.add(turn.request) is None
    copies = [0, 0, 0]
    later: Launched | None = None

    def launch(scheduled: tuple[StepPlan, list[SampledRow]] | None) -> Launched | None:
        nonlocal copies
        if scheduled is None:
            return None
        plan, rows = scheduled
        carried = (plan.saves, plan.compressions, plan.restores)
        copies = [count + len(pairs) // 8 for count, pairs in zip(copies, carried, strict=True)]
        return engine.launch(plan, [row.sampling for row in rows])

    while batcher.has_work or later is not None:
        step = later or launch(batcher.schedule(float(batcher.step)))
        assert step is not None
        # A step with restores, which may fail, has none behind it.
        later = launch(batcher.schedule_ahead(float(batcher.step))) if settings.lookahead == "on" else None
        try:
            entries = batcher.update(step.result())
        except RestoreFailed as error:
            entries = batcher.fail_restores(error.slots)
        batcher.check()
        news = [entry for batch in entries.values() for entry in batch]
        for entry in news:
            go_on(batcher, load, answers, entry)
        say(news)
    (directory / "known.json").write_bytes(
        msgspec.json.encode(Known(known_blocks(batcher), copies, recovered))
    )
    engine.close()


def go_on(
    batcher: Scheduler, load: dict[str, Turn], answers: dict[str, list[int]], entry: TokenEntry
) -> None:
    """The session's next turn, once it has its answer."""
    answers[entry.generation_id] += entry.tokens
    turn = load[entry.generation_id]
    if not entry.finish or not turn.later:
        return
    assert entry.finish == "length", entry.error
    name = f"{entry.generation_id}+"
    prompt = turn.request.prompt + answers[entry.generation_id] + turn.later[0]
    request = msgspec.structs.replace(
        turn.request, generation_id=name, prompt=prompt, generated=[], attempt=0
    )
    load[name], answers[name] = Turn(request, turn.later[1:]), []
    assert batcher.add(request) is None


def known_blocks(batcher: Scheduler) -> dict[int, list[int]]:
    """Every block in the prefix index whose whole beginning is there too, with all tokens up to its end."""
    allocator = batcher._tables._allocator
    keys = allocator._index._keys
    by_digest = {key.digest: key for key in keys.values()}
    blocks = {}
    for block, key in keys.items():
        chain = [key]
        while chain[-1].parent in by_digest:
            chain.append(by_digest[chain[-1].parent])
        if chain[-1].parent == batcher._root:
            tokens = b"".join(link.tokens for link in reversed(chain))
            blocks[block] = list(memoryview(tokens).cast("i"))
    return blocks


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # standard output is taken
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    settings = ExecutorSettings.model_validate_json((directory / "settings.json").read_bytes())
    spec = RankSpec(rank, settings.tp, "g", "i", 1, str(directory / "board"), {})
    board = RingBoard(directory / "board", settings.tp)
    storage.KvStore = ShownStore  # type: ignore[misc]
    if rank == 0:
        lead(settings, spec, board, directory)
    else:
        ring_engine.follow_ring(
            settings, spec, board, msgspec.json.decode(sys.stdin.readline(), type=Rendezvous)
        )
    [store] = stores
    every = torch.arange(store.num_blocks)
    layers = [
        tuple(part.clone() for part in store.gather(layer, every, len(every)))
        for layer in range(store.shape.num_layers)
    ]
    torch.save(layers, directory / f"rank-{rank}.pt")


if __name__ == "__main__":
    main()

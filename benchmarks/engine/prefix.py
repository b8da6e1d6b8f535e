"""How much of what was said before is found again: `python -m benchmarks.engine.prefix`.

The real batcher, allocator and spill tiers drive the multi-turn workload with an engine that computes
nothing, so this is what the KV cache's bookkeeping can do, whatever the model. Reusable is every token of a
turn's prompt that the same session has said or been answered before; only whole blocks can be reused, and
the last token of an answer is never computed.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.engine.in_process import take_step
from benchmarks.harness import Sheet, run, show
from benchmarks.serve.workloads import WORKLOADS, Workload
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest, SamplingParams

VOCABULARY = 50_000
BLOCK = 16
TEMPLATE_TOKENS = 20  # a system prompt that all sessions begin with


@dataclass
class Conversation:
    """One session's state."""

    name: str
    said: list[int] = field(default_factory=list)
    turns: int = 0
    answer: list[int] = field(default_factory=list)


@dataclass
class Reuse:
    """Tokens of all turns."""

    prompt: int = 0
    reusable: int = 0
    found: int = 0

    @property
    def hit_rate(self) -> float:
        return self.found / self.reusable


class Load:
    """`workload.clients` turns at a time; a session whose turn is over joins the end of the queue."""

    def __init__(self, workload: Workload, sessions: int, spec: EngineSpec, seed: int = 0) -> None:
        self._workload = workload
        self._rng = random.Random(seed)
        template = self._tokens(TEMPLATE_TOKENS)
        self._queue = deque(Conversation(f"s{n}", list(template)) for n in range(sessions))
        self._open: dict[str, Conversation] = {}
        self._batcher = Scheduler(spec, BatchSettings(session_ttl=900.0), "benchmark")
        self.reuse = Reuse()

    def run(self) -> Reuse:
        while True:
            while self._queue and len(self._open) < self._workload.clients:
                self._say(self._queue.popleft())
            if not self._batcher.has_work:
                return self.reuse
            self._step()

    def _say(self, conversation: Conversation) -> None:
        self.reuse.reusable += len(conversation.said) if conversation.turns else 0
        new = self._workload.prompt_tokens - (0 if conversation.turns else TEMPLATE_TOKENS)
        conversation.said += self._tokens(new)
        conversation.turns += 1
        conversation.answer = []
        self.reuse.prompt += len(conversation.said)
        name = f"{conversation.name}-{conversation.turns}"
        self._open[name] = conversation
        sampling = SamplingParams(temperature=0.0)
        tokens = self._workload.output_tokens
        request = GenerationRequest(
            name, "r", "m", "c", list(conversation.said), tokens, sampling, session=conversation.name
        )
        assert self._batcher.add(request) is None

    def _step(self) -> None:
        def execute(plan: StepPlan, rows: Sequence[object]) -> list[SampledToken]:
            return [SampledToken(self._rng.randrange(VOCABULARY)) for _ in rows]

        for entry in take_step(self._batcher, execute).entries:
            conversation = self._open[entry.generation_id]
            conversation.answer += entry.tokens
            if conversation.turns > 1:
                self.reuse.found += entry.cached_tokens
            if entry.finish:
                del self._open[entry.generation_id]
                conversation.said += conversation.answer
                if conversation.turns < self._workload.turns:
                    self._queue.append(conversation)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]


# (sessions, what the cache holds): a session needs 41 blocks by its end.
CASES: dict[str, tuple[int, EngineSpec]] = {
    "8 sessions, room for all": (8, EngineSpec(BLOCK, 1024, 8192, VOCABULARY)),
    "64 sessions, room for 9, nowhere to spill": (64, EngineSpec(BLOCK, 384, 8192, VOCABULARY)),
    "64 sessions, room for 9, host memory": (64, EngineSpec(BLOCK, 384, 8192, VOCABULARY, num_host=3072)),
    "64 sessions, room for 9, disk": (64, EngineSpec(BLOCK, 384, 8192, VOCABULARY, num_disk=3072)),
}


def main() -> None:
    """Share of the reusable tokens of W4 that is found in the KV cache."""
    rows = []
    for name, (sessions, spec) in CASES.items():
        reuse = Load(WORKLOADS["W4"], sessions, spec).run()
        rows.append((name, reuse.prompt, reuse.reusable, reuse.found, f"{reuse.hit_rate:.1%}"))
    show(Sheet(("W4: 4 turns, 100 + 64 tokens each", "prompt tokens", "reusable", "found", "hit rate"), rows))


if __name__ == "__main__":
    run(main)

"""What holding texts to a grammar costs: `python -m benchmarks.engine.structured MODEL`.

The real model, batcher and sampler in this process, and masks computed beside the steps as in the ring's leader;
without HTTP and NATS. Prints milliseconds of a step that decodes, without and with a grammar, greedy and at temperature
1, in turn (the best round of each counts); grammars are of JSON that goes on until the last token.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine.in_process import Execute, Step, make_execute, steps_of
from benchmarks.engine.steps import BLOCK, load_one_rank
from benchmarks.harness import CORES, Dtype, ModelDirectory, Rounds, Sheet, Threads, in_turns, run, show
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.structured_output import GrammarCompiler, GrammarWork, Vocabulary
from shared.messages import GenerationRequest, Grammar, SamplingParams

BLOCKS, CONTEXT = 2048, 2048
PROMPT = 64  # tokens of each prompt


def record(properties: int) -> dict[str, Any]:
    """A schema of strings, numbers and enumerations."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10_000},
        {"enum": ["low", "middle", "high"]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 5},
    ]
    names = [f"property_{number}" for number in range(properties)]
    return {
        "type": "object",
        "properties": {name: kinds[number % len(kinds)] for number, name in enumerate(names)},
        "required": names,
        "additionalProperties": False,
    }


def endless(properties: int) -> Grammar:
    """An array of records that does not end."""
    return _of({"type": "array", "items": record(properties), "minItems": 1000})


def _of(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@dataclass(frozen=True)
class Case:
    """What one run does."""

    grammar: Grammar | None
    temperature: float


CASES = {
    "free, greedy": Case(None, 0.0),
    "JSON, greedy": Case(endless(8), 0.0),
    "free, temperature 1": Case(None, 1.0),
    "JSON, temperature 1": Case(endless(8), 1.0),
}


class Bench:
    """A model with its vocabulary."""

    def __init__(self, execute: Execute, spec: EngineSpec, vocabulary: Vocabulary, work: GrammarWork) -> None:
        self._execute, self._spec, self._work = execute, spec, work
        self._vocabulary = vocabulary
        self.compiler = GrammarCompiler(vocabulary)

    def decode(self, case: Case, sequences: int, tokens: int) -> tuple[float, list[int]]:
        """(median milliseconds of a step that decodes, the first text)."""
        times, text = [], []
        for step in self._steps(case, sequences, tokens):
            if step.plan.num_decodes == sequences:
                times.append(step.seconds)
            text += [token for entry in step.entries if entry.generation_id == "0" for token in entry.tokens]
        return statistics.median(times) * 1e3, text

    def _steps(self, case: Case, sequences: int, tokens: int) -> Iterator[Step]:
        batcher = Scheduler(self._spec, BatchSettings(max_drafts=0), "benchmark")
        for number in range(sequences):
            request = self._request(case, number, tokens)
            batcher.add(request)
            if case.grammar is not None:
                batcher.release(request, self.compiler.start(request))

        def execute(plan: StepPlan, states: Sequence[SamplingState]) -> list[SampledToken]:
            self._work.begin_masks(states)
            return self._execute(plan, states)

        yield from steps_of(batcher, execute)

    def _request(self, case: Case, number: int, tokens: int) -> GenerationRequest:
        words = self._spec.vocab_size * 9 // 10  # the first ids are bytes and special tokens
        prompt = [self._spec.vocab_size - 1 - (number * 997 + at * 31) % words for at in range(PROMPT)]
        sampling = SamplingParams(case.temperature, seed=number)
        return GenerationRequest(str(number), "r", "m", "c", prompt, tokens, sampling, grammar=case.grammar)


@contextmanager
def bench_of(model: Path, dtype: str, threads: int) -> Iterator[Bench]:
    runner, _ = load_one_rank(model, dtype, threads, BLOCKS)
    from services.executor.model.card import read_card
    from services.executor.sampling.sampler import Sampler

    runner.warm_up()
    execute, spec = make_execute(runner, Sampler(runner.rows)), EngineSpec(BLOCK, BLOCKS, CONTEXT, runner.vocab_size)
    card, bundle = read_card(model, "benchmark", spec)
    work = GrammarWork()
    work.load(card, bundle)
    bench = Bench(execute, spec, Vocabulary.of(card, bundle), work)
    try:
        yield bench
    finally:
        bench.compiler.close()
        work.close()


def main(
    model: ModelDirectory,
    dtype: Dtype = "bf16",
    threads: Threads = CORES,
    rounds: Rounds = 3,
    tokens: Annotated[int, typer.Option(help="Output tokens of each text.", min=8)] = 128,
    at_once: Annotated[str, typer.Option(help="Sequences at a time.")] = "1,8",
) -> None:
    """Decode with and without a grammar."""
    batches = [int(count) for count in at_once.split(",")]
    with bench_of(model, dtype, threads) as bench:
        cases = [(name, count) for count in batches for name in CASES]
        work = {(name, count): partial(bench.decode, CASES[name], count, tokens) for name, count in cases}
        found = in_turns(work, rounds)
        best = {case: f"{min(taken for taken, _ in runs):.2f}" for case, runs in found.items()}
        rows = [(name, *(best[name, count] for count in batches)) for name in CASES]
        show(Sheet(("ms per step", *(f"{count} at once" for count in batches)), rows))


if __name__ == "__main__":
    run(main)

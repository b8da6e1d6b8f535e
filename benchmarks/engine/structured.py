"""What holding texts to a grammar costs: `python -m benchmarks.engine.structured MODEL`.

The real model, batcher and sampler in this process, and masks computed beside the steps as in the ring's leader;
without HTTP and NATS. Prints:

    decode    milliseconds of a step that decodes, without and with a grammar, greedy and at temperature 1, in turn
              (the best round of each counts); grammars of JSON that goes on until the last token
    drafts    tokens per second of JSON with a schema, without and with speculation: one record, whose names are
              forced, and many, which repeat themselves; the texts are compared
    masks     microseconds to compute what may follow, by position, and to compile a grammar, new and known
"""

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.engine.in_process import Execute, Step, steps_of
from benchmarks.engine.speculation import model_of
from benchmarks.errors import BenchError
from benchmarks.harness import (
    CORES,
    Dtype,
    ModelDirectory,
    Rounds,
    Sheet,
    Threads,
    in_turns,
    nearest,
    run,
    show,
)
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import MOST_DRAFTS
from services.executor.core.step_plan import StepPlan
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from services.executor.scheduler.drafting import Drafter
from services.executor.scheduler.proposers.catalog import PROPOSERS
from services.executor.structured_output import GrammarCompiler, GrammarWork, Vocabulary
from shared.messages import GenerationRequest, Grammar, SamplingParams

PROMPT = 64
"""Tokens of each prompt."""


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


GRAMMARS = {
    "JSON object, any": _of({"type": "object"}),
    "record of 8": _of(record(8)),
    "record of 200": _of(record(200)),
    "100 records of 20": _of(
        {"type": "object", "properties": {f"r{n}": record(20) for n in range(100)}, "required": ["r0"]}
    ),
    "regular expression": Grammar("regex", r"[A-Z][a-z]+( [A-Z][a-z]+){1,3}, [0-9]{1,3} years"),
}


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
DRAFTED = {
    "one record, greedy": Case(GRAMMARS["record of 8"], 0.0),
    "one record, temperature 1": Case(GRAMMARS["record of 8"], 1.0),
    "records, greedy": CASES["JSON, greedy"],
    "records, temperature 1": CASES["JSON, temperature 1"],
}
"""What runs with speculation too."""


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

    def rate(
        self, case: Case, sequences: int, tokens: int, drafts: int
    ) -> tuple[float, dict[str, list[int]]]:
        """(output tokens per second behind the prompts, the texts)."""
        texts: dict[str, list[int]] = {str(number): [] for number in range(sequences)}
        taken, counted = 0.0, 0
        for step in self._steps(case, sequences, tokens, drafts):
            for entry in step.entries:
                texts[entry.generation_id] += entry.tokens
            if len(step.plan.token_ids) // 4 < PROMPT:
                taken += step.seconds
                counted += sum(len(entry.tokens) for entry in step.entries)
        return counted / taken, texts

    def _steps(self, case: Case, sequences: int, tokens: int, drafts: int = 0) -> Iterator[Step]:
        limits = BatchSettings(max_drafts=drafts)
        drafter = Drafter(self._spec, limits, PROPOSERS)
        batcher = ContinuousBatcher(self._spec, limits, "benchmark", drafter)
        for number in range(sequences):
            request = self._request(case, number, tokens)
            batcher.add(request)
            if case.grammar is not None:
                batcher.release(request, self.compiler.start(request))

        def execute(plan: StepPlan, states: Sequence[SamplingState]) -> list[SampledToken]:
            self._work.begin_masks(states)
            return self._execute(plan, states)

        yield from steps_of(batcher, execute)

    def masks(self, grammar: Grammar, text: Sequence[int]) -> list[float]:
        """Microseconds to compute what may follow at each position of `text`."""
        state, times = self.compiler.start(self._request(Case(grammar, 0.0), 0, len(text))), []
        for token in text:
            began = time.perf_counter()
            state.allowed()
            times.append((time.perf_counter() - began) * 1e6)
            state.advance(token)
        return times

    def compile(self, grammar: Grammar) -> tuple[float, float]:
        """Milliseconds to compile `grammar`, and to begin another text of it."""
        self.compiler.start(self._request(Case(Grammar("regex", "x"), 0.0), 0, 1))  # its process has started
        taken = []
        for _ in range(2):
            began = time.perf_counter()
            self.compiler.start(self._request(Case(grammar, 0.0), 0, 1))
            taken.append((time.perf_counter() - began) * 1e3)
        return taken[0], taken[1]

    def _request(self, case: Case, number: int, tokens: int) -> GenerationRequest:
        words = self._spec.vocab_size * 9 // 10  # the first ids are bytes and special tokens
        prompt = [self._spec.vocab_size - 1 - (number * 997 + at * 31) % words for at in range(PROMPT)]
        sampling = SamplingParams(case.temperature, seed=number)
        return GenerationRequest(str(number), "r", "m", "c", prompt, tokens, sampling, grammar=case.grammar)


@contextmanager
def bench_of(model: Path, dtype: str, threads: int) -> Iterator[Bench]:
    from services.executor.model.card import read_card

    execute, spec = model_of(model, dtype, threads)
    card, bundle = read_card(model, "benchmark", spec)
    work = GrammarWork()
    work.load(card, bundle)
    bench = Bench(execute, spec, Vocabulary.of(card, bundle), work)
    try:
        yield bench
    finally:
        bench.compiler.close()
        work.close()


def drafted(bench: Bench, rounds: int, batches: list[int], tokens: int) -> Sheet:
    """The best round of each counts. Raises `BenchError` where speculation changes a text."""
    rows = []
    for name, case in DRAFTED.items():
        cells = []
        for count in batches:
            work = {most: partial(bench.rate, case, count, tokens, most) for most in (0, MOST_DRAFTS)}
            found = in_turns(work, rounds)
            if any(one[1] != other[1] for one, other in zip(*found.values(), strict=True)):
                raise BenchError(f"{name}, {count} at once: with drafts the texts are others; report it.")
            plain, fast = (max(rate for rate, _ in runs) for runs in found.values())
            cells.append(f"{plain:.0f}, {fast:.0f} (x{fast / plain:.2f})")
        rows.append((name, *cells))
    return Sheet(("tokens/s: without, with drafts", *(f"{count} at once" for count in batches)), rows)


def main(
    model: ModelDirectory,
    dtype: Dtype = "bf16",
    threads: Threads = CORES,
    rounds: Rounds = 3,
    tokens: Annotated[int, typer.Option(help="Output tokens of each text.", min=8)] = 128,
    at_once: Annotated[str, typer.Option(help="Sequences at a time.")] = "1,8",
) -> None:
    """Decode with and without a grammar; drafts; masks; compiling."""
    batches = [int(count) for count in at_once.split(",")]
    with bench_of(model, dtype, threads) as bench:
        cases = [(name, count) for count in batches for name in CASES]
        work = {(name, count): partial(bench.decode, CASES[name], count, tokens) for name, count in cases}
        found = in_turns(work, rounds)
        best = {case: f"{min(taken for taken, _ in runs):.2f}" for case, runs in found.items()}
        masks = []
        for name in ("JSON, greedy", "JSON, temperature 1"):
            times = bench.masks(endless(8), found[name, batches[-1]][-1][1])
            masks.append((name, *(f"{nearest(times, share):.0f}" for share in (0.5, 0.99, 1.0))))
        compiled = [(name, grammar, bench.compile(grammar)) for name, grammar in GRAMMARS.items()]
        show(
            Sheet(
                ("ms per step", *(f"{count} at once" for count in batches)),
                [(name, *(best[name, count] for count in batches)) for name in CASES],
            ),
            # Behind what is measured of grammars that are new.
            drafted(bench, rounds, batches, tokens),
            Sheet(("microseconds per mask", "median", "99%", "most"), masks),
            Sheet(
                ("ms to compile", "bytes", "new", "known"),
                [(name, len(one.text), f"{new:.1f}", f"{known:.2f}") for name, one, (new, known) in compiled],
            ),
        )


if __name__ == "__main__":
    run(main)

"""What speculation gains by kind, and that it costs nothing where it gains nothing.

`python -m benchmarks.engine.speculation MODEL`: the real model, batcher and sampler in this process, without HTTP
and NATS. Each load runs without speculation, with n-gram drafts and, with `--draft`, with those of a draft model or
head too, in turn; the best round of each counts.

MODEL is a model directory with a tokenizer and a chat template. `--draft` needs a draft model with the same tokenizer,
an EAGLE-3 head that was trained for MODEL, or (`mtp`) a MODEL whose checkpoint has a head for multi-token prediction.
What they gain depends on how often they are right: random weights show their cost alone. Loads:

    repeat   a text that is to be repeated word for word        greedy, ends as the model ends it
    edit     code in which one name is to be changed            greedy, ends as the model ends it
    words    random words (`benchmarks.serve.workloads`)        greedy, 128 tokens each
    sampled  random words                                       temperature 1, 128 tokens each

`--llama-cpp SOURCE` adds llama.cpp with the same two models, greedy and alone, by its `llama-speculative-simple`.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.engine.in_process import Execute, ring_in, set_threads, take_step
from benchmarks.engine.llama_cpp import LlamaCpp
from benchmarks.errors import BenchError
from benchmarks.harness import CORES, Dtype, ModelDirectory, Rounds, Sheet, Threads, in_turns, run, show
from benchmarks.serve.workloads import PromptSource, calibrate
from services.executor.core.engine import DraftPlan, DraftToken, EngineSpec
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import MOST_DRAFTS, MTP
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from shared.messages import GenerationRequest, SamplingParams

CONTEXT = 2048
KV_MEMORY = 3 << 30  # of a model and its draft model
_PROMPT = "The history of the lighthouse begins with"
OUTPUT = 128
_TEXT = (
    "The {0} stood at the edge of the {1}, where the road turns north. Every morning the {2} came by with "
    "a basket of {3}, and every evening it went home with an empty one. Nobody knew what became of the {3}, "
    "and the {0} never told. When the first snow fell on the {1}, the {2} did not come, and the village "
    "waited for news."
)
_CODE = (
    "def total_{0}(items, rate):\n    result = 0\n    for item in items:\n        if item.kind == '{1}':\n"
    "            result += item.price * item.count\n        else:\n            result += item.price\n"
    "    if result > {2}:\n        result = result * (1 - rate)\n    return result\n"
)
_NOUNS = ("mill", "lake", "baker", "bread", "tower", "river", "fox", "apples", "church", "field", "smith")

Draft = Callable[[DraftPlan, Sequence[SamplingState]], list[list[DraftToken]]]
PLAIN_KINDS = ("none", "n-gram")


@dataclass
class Run:
    """One load, once."""

    texts: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    # Of `seconds`, in steps that have computed no prompt, their rounds of drafts included.
    decoding: float = 0.0
    decoded: int = 0  # tokens of these steps
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(text) for text in self.texts.values())

    @property
    def rate(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Output tokens per second of steps without prompts."""
        return self.decoded / self.decoding if self.decoding else 0.0

    def add(self, told: dict[str, list[int]], seconds: float) -> None:
        """A step that took `seconds` has told these tokens of each request; each prompt fits into one."""
        first = False
        for name, tokens in told.items():
            first = first or not self.texts[name]
            self.texts[name] += tokens
        if not first:
            self.decoding += seconds
            self.decoded += sum(map(len, told.values()))
        self.steps += 1


class Loads:
    """The requests of each load, with the model's own chat template."""

    def __init__(self, directory: Path, output: int = OUTPUT) -> None:
        """`output`: tokens of each answer at most."""
        from transformers import AutoTokenizer

        self._output = output
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))

    def make(self, load: str, count: int) -> list[GenerationRequest]:
        rng = random.Random(7)
        sampling = SamplingParams(temperature=1.0 if load == "sampled" else 0.0)
        stops = [self._tokenizer.eos_token_id] if load in ("repeat", "edit") else []
        return [
            GenerationRequest(
                str(number),
                "r",
                "m",
                "c",
                self._render([message]),
                self._output,
                SamplingParams(sampling.temperature, seed=number),
                stops,
            )
            for number, message in enumerate(self._messages(load, count, rng))
        ]

    def _messages(self, load: str, count: int, rng: random.Random) -> list[str]:
        if load == "repeat":
            texts = [_TEXT.format(*rng.sample(_NOUNS, 4)) for _ in range(count)]
            return [f"Repeat this text word for word:\n\n{text}" for text in texts]
        if load == "edit":
            codes = [_CODE.format(*rng.sample(_NOUNS, 2), rng.randrange(1000)) for _ in range(count)]
            return [f"Rename the variable result to amount in this code:\n\n{code}" for code in codes]
        vocabulary = asyncio.run(calibrate(self._measure, turns=False))
        source = PromptSource(vocabulary, 7)
        return [source.prompt(128) for _ in range(count)]

    async def _measure(self, messages: Sequence[str]) -> int:
        return len(self._render(messages))

    def _render(self, messages: Sequence[str]) -> list[int]:
        roles = ("user", "assistant")
        chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
        rendered = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        tokens: list[int] = rendered["input_ids"]
        return tokens


@contextmanager
def engine_of(
    model: Path, draft: str, dtype: str, threads: int, device: str
) -> Iterator[tuple[Execute, EngineSpec, Draft | None]]:
    """What computes and samples one step, and what has the draft model propose; None: there is none."""
    set_threads(threads)
    from services.executor.core.settings import ExecutorSettings
    from shared.config import load_settings

    settings = load_settings(
        ExecutorSettings,
        model=str(model),
        draft_model=draft,
        device=device,
        dtype=dtype,
        threads=threads,
        kv_memory=KV_MEMORY,
        context_length=CONTEXT,
    )
    with TemporaryDirectory() as scratch, closing(ring_in(Path(scratch), settings)) as engine:
        spec = engine.load(lambda done, total: None)
        if draft and not spec.drafts:
            raise BenchError(f"The draft model was left out: {spec.draft_left_out}")
        yield engine.execute, spec, engine.draft if draft else None


def decode(
    execute: Execute,
    spec: EngineSpec,
    requests: list[GenerationRequest],
    at_once: int,
    drafts: int,
    draft: Draft | None = None,
) -> Run:
    """All requests, `at_once` at a time; `draft`: the draft model's rounds."""
    settings = BatchSettings(max_sequences=at_once, max_drafts=drafts)
    spec = msgspec.structs.replace(spec, drafts=draft is not None)
    batcher = Scheduler(spec, settings, "benchmark", Drafter(spec, settings, PROPOSERS))
    for request in requests:
        batcher.add(request)
    result = Run({request.generation_id: [] for request in requests})
    began = time.perf_counter()
    while batcher.has_work:
        round_began = time.perf_counter()
        if draft is not None and (planned := batcher.plan_drafts(began)) is not None:
            draft_began = time.perf_counter()
            drafted = draft(planned[0], [row.sampling for row in planned[1]])
            batcher.take_drafts(drafted, time.perf_counter() - draft_began)
        told = {entry.generation_id: list(entry.tokens) for entry in take_step(batcher, execute).entries}
        result.add(told, time.perf_counter() - round_began)
    result.seconds = time.perf_counter() - began
    result.drafted, result.accepted = batcher.drafter.drafted, batcher.drafter.accepted
    return result


def measure(
    engine: tuple[Execute, EngineSpec, Draft | None],
    requests: list[GenerationRequest],
    places: int,
    rounds: int,
    drafts: int,
) -> dict[str, Run]:
    """The best round of each kind, taken in turn."""
    execute, spec, draft = engine
    of_draft = "draft head" if spec.draft_reads_states else "draft model"

    def once(kind: str) -> Run:
        most, model = (0 if kind == "none" else drafts), (draft if kind == of_draft else None)
        return decode(execute, spec, requests, places, most, model)

    kinds = PLAIN_KINDS if draft is None else (*PLAIN_KINDS, of_draft)
    found = in_turns({kind: partial(once, kind) for kind in kinds}, rounds)
    return {kind: max(runs, key=lambda each: each.rate) for kind, runs in found.items()}


def rows_of(load: str, places: int, found: dict[str, Run]) -> list[list[str]]:
    """Of the table, one for each kind."""
    plain = found["none"]
    return [
        [
            load,
            str(places),
            kind,
            f"{one.rate:.1f}",
            f"{one.rate / plain.rate:.2f}x",
            f"{one.decode_rate:.1f}",
            f"{one.decode_rate / plain.decode_rate:.2f}x" if plain.decode_rate else "-",
            f"{one.drafted / one.steps:.1f}",
            f"{one.accepted / one.drafted:.0%}" if one.drafted else "-",
            f"{sum(plain.texts[name] == text for name, text in one.texts.items())}/{len(one.texts)}",
        ]
        for kind, one in found.items()
    ]


def main(
    model: ModelDirectory,
    draft: Annotated[str, typer.Option(help="Directory of a draft model or EAGLE-3 head, or mtp.")] = "",
    dtype: Dtype = "bf16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Threads = CORES,
    rounds: Rounds = 2,
    loads: Annotated[str, typer.Option(help="Which loads.")] = "repeat,edit,words,sampled",
    at_once: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8,64",
    turns: Annotated[int, typer.Option(help="Requests for each place, one after the other.", min=1)] = 1,
    drafts: Annotated[int, typer.Option(help="Drafts of one sequence at most.")] = MOST_DRAFTS,
    output: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = OUTPUT,
    llama_cpp: Annotated[Path | None, typer.Option(help="llama.cpp's source, built in build/.")] = None,
) -> None:
    """Tokens per second by kind of speculation."""
    source, rows, peer = Loads(model, output), list[list[str]](), dict[str, float]()
    if llama_cpp is not None and draft not in ("", MTP):
        peer = LlamaCpp(llama_cpp, Path(draft)).speculation(model, Path(draft), _PROMPT, output, threads)
    with engine_of(model, draft, dtype, threads, device) as engine:
        for load in loads.split(","):
            for places in map(int, at_once.split(",")):
                requests = source.make(load, max(2, places * turns))
                rows += rows_of(load, places, measure(engine, requests, places, rounds, drafts))
    rows += [["a prompt", "1", f"llama.cpp, {kind}", f"{rate:.1f}"] for kind, rate in peer.items()]
    head = (
        *("load", "at once", "kind", "tok/s", "gain", "decoding", "gain"),
        *("drafts/step", "accepted", "same text"),
    )
    show(Sheet(head, rows, left=("kind",)))


if __name__ == "__main__":
    run(main)

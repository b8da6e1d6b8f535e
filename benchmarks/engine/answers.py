"""How many questions a model answers right, as it is served and as transformers computes it in float32:
`python -m benchmarks.engine.answers --help`.

The engine answers as behind the server: weights, KV cache, batcher and sampler, in this process. transformers computes
the same files in float32, and its logits go through the same sampler. A drawn token depends on its seed and position
alone, so both draw by the same numbers, and what differs comes from the logits.

Greedily a question counts as answered where the answer stands in the text; sampled, where it stands in more than half
of the texts, of one seed each. Behind are the questions that
transformers answers and the other way does not.

    --ways auto,bf16,"bf16 bf16"      `--weight-dtype`, and after a space `--kv-dtype`, of the engine
    --rounded "nothing,lm_head"       transformers, with the inputs of linear layers rounded to int8 as the CPU's
                                      kernels round them, but for those that are named

With `auto` the codes of a GGUF file are multiplied as they are where MODEL is the file; the directory of a built-in
model may say that they are unpacked.
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer
from msgspec import structs
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.engine.in_process import ring_of_one, steps_of
from benchmarks.engine.weight_quality import rounded
from benchmarks.harness import CORES, Sheet, Threads, run, show
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.model.card import end_tokens
from services.executor.model.loading.checkpoints import resolve_model
from services.executor.model.tokenizer_files import read_json
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from shared.config import load_settings
from shared.messages import GenerationRequest, SamplingParams
from shared.model_store.settings import Store

GREEDY = SamplingParams(temperature=0)
SEEDS = range(1, 4)
TOKENS = 24
"""Of an answer; a right one comes at its beginning."""
QUESTIONS = Path(__file__).parents[2] / "tests/e2e/everyday_questions.jsonl"


class Question(msgspec.Struct, frozen=True):
    question: str
    answers: list[str]
    """Words or numbers, any of which makes a text right."""

    def is_answered(self, text: str) -> bool:
        return any(
            re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in self.answers
        )


@dataclass(frozen=True)
class Texts:
    """What one way says: of each question the greedy text, and one for each seed."""

    greedy: list[str]
    sampled: list[list[str]]

    def right(self, questions: Sequence[Question]) -> "Right":
        greedy = [one.is_answered(text) for one, text in zip(questions, self.greedy, strict=True)]
        sampled = [
            2 * sum(map(one.is_answered, texts)) > len(texts)
            for one, texts in zip(questions, self.sampled, strict=True)
        ]
        return Right(greedy, sampled)


@dataclass(frozen=True)
class Right:
    """Of each question whether it is answered."""

    greedy: list[bool]
    sampled: list[bool]
    """In most of its texts."""

    def behind(self, first: "Right") -> tuple[int, int]:
        """Questions, greedily and sampled, that are answered in the first and not here."""
        pairs = ((first.greedy, self.greedy), (first.sampled, self.sampled))
        greedy, sampled = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in pairs)
        return greedy, sampled


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    return [msgspec.json.decode(line, type=Question) for line in path.read_bytes().splitlines()]


class Asked:
    """The prompts of questions to the model in `directory`, and how its texts are drawn beside greedily."""

    def __init__(self, directory: Path, questions: Sequence[Question], own: SamplingParams) -> None:
        self.directory, self.questions = directory, questions
        self._tokenizer = AutoTokenizer.from_pretrained(str(directory))
        self.prompts: list[list[int]] = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": one.question}], add_generation_prompt=True, return_dict=False
            )
            for one in questions
        ]
        self.stops = end_tokens(
            *(read_json(directory / name) for name in ("config.json", "generation_config.json"))
        )
        self.ways = [GREEDY, *(structs.replace(own, seed=seed) for seed in SEEDS)]

    def texts(self, tokens: Sequence[list[int]]) -> Texts:
        """Of the tokens of every question, by ways."""
        said = [self._tokenizer.decode(one, skip_special_tokens=True) for one in tokens]
        count = len(self.prompts)
        return Texts(said[:count], [said[at + count :: count] for at in range(count)])


def by_engine(asked: Asked, **settings: str) -> Texts:
    """What the executor says with these settings beside its defaults."""
    requests = [
        GenerationRequest(f"{way}-{at}", "", "", "", prompt, TOKENS, sampling, stop_token_ids=asked.stops)
        for way, sampling in enumerate(asked.ways)
        for at, prompt in enumerate(asked.prompts)
    ]
    said: dict[str, list[int]] = {request.generation_id: [] for request in requests}
    known = {"weight_cache_bytes": 0, "kv_memory": 512 << 20}
    loaded = load_settings(ExecutorSettings, model=str(asked.directory), **known, **settings)
    with ring_of_one(loaded) as (engine, spec):
        batcher = ContinuousBatcher(spec, BatchSettings())
        for request in requests:
            batcher.add(request)
        for step in steps_of(batcher, engine.execute):
            for entry in step.entries:
                said[entry.generation_id] += entry.tokens
    return asked.texts(list(said.values()))


def load_float32(directory: Path) -> Any:
    """The model as transformers computes it, its weights in float32."""
    file = {"gguf_file": "model.gguf"} if (directory / "model.gguf").exists() else {}
    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32, **file).eval()


@torch.inference_mode()
def by_transformers(asked: Asked, model: Any) -> Texts:
    """What transformers computes, drawn by our sampler."""
    ways, count = len(asked.ways), len(asked.prompts)
    width = max(map(len, asked.prompts))
    following = torch.tensor([[asked.stops[0]] * (width - len(prompt)) + prompt for prompt in asked.prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked.prompts])
    cache = DynamicCache(config=model.config)
    logits = _last_logits(model, following, mask, cache).repeat_interleave(ways, dim=0)
    cache.batch_repeat_interleave(ways)
    mask = mask.repeat_interleave(ways, dim=0)
    said: list[list[int]] = [[] for _ in range(count * ways)]
    active = [*range(count * ways)]
    """Rows whose texts have not ended: of each question one for each way."""
    for _ in range(TOKENS):
        states = [SamplingState(asked.ways[row % ways], [], said[row]) for row in active]
        drawn = [one.token for one in Sampler().sample(logits, states)]
        stay = [at for at, token in enumerate(drawn) if token not in asked.stops]
        for at in stay:
            said[active[at]].append(drawn[at])
        if not stay:
            break
        active, rows = [active[at] for at in stay], torch.tensor(stay)
        cache.batch_select_indices(rows)
        mask = torch.cat((mask[rows], torch.ones(len(stay), 1, dtype=mask.dtype)), dim=1)
        logits = _last_logits(model, torch.tensor(drawn)[rows].view(-1, 1), mask, cache)
    return asked.texts([said[question * ways + way] for way in range(ways) for question in range(count)])


def _last_logits(model: Any, tokens: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """[rows, vocabulary], of the last of `tokens` [rows, n], which come after what `cache` has."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    said = model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
    )
    logits: torch.Tensor = said.logits[:, -1].float()
    return logits


@contextmanager
def rounding(model: Any, left_out: str) -> Iterator[None]:
    """Has what goes into linear layers rounded to int8, but for those with `left_out` in their name."""
    linears = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and left_out not in name
    ]
    hooks = [module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),)) for module in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def main(
    model: Annotated[Path, typer.Argument(help="A model directory or a .gguf file.")],
    ways: Annotated[
        str, typer.Option(help="Of the engine, with commas between.")
    ] = "auto,bf16,bf16 bf16,auto bf16",
    also: Annotated[
        str, typer.Option("--rounded", help="Of transformers, with commas between; empty: none.")
    ] = "",
    temperature: Annotated[float, typer.Option(help="Of sampled texts; the built-in model's default.")] = 0.2,
    top_p: Annotated[float, typer.Option(help="Likewise.")] = 0.9,
    questions: Annotated[
        Path, typer.Option(help="Lines of JSON: a question, and what answers it.")
    ] = QUESTIONS,
    threads: Threads = CORES,
) -> None:
    """Questions answered right by each way."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as scratch:
        directory = resolve_model(str(model), Store.at(Path(scratch)), lambda *_: None)
        asked = Asked(
            directory, read_questions(questions), SamplingParams(temperature=temperature, top_p=top_p)
        )
        loaded = load_float32(directory)
        first = by_transformers(asked, loaded)
        told = {"transformers, float32": first}
        for way in ways.split(","):
            weights, _, kv = way.partition(" ")
            told[way] = by_engine(asked, weight_dtype=weights, kv_dtype=kv or "auto", threads=str(threads))
        for left_out in filter(None, also.split(",")):
            with rounding(loaded, left_out):
                told[f"transformers, rounded: {left_out}"] = by_transformers(asked, loaded)
    best, rows = first.right(asked.questions), []
    for name, texts in told.items():
        right = texts.right(asked.questions)
        same = sum(a == b for a, b in zip(texts.greedy, first.greedy, strict=True))
        greedy, sampled = right.behind(best)
        rows.append((name, sum(right.greedy), greedy, sum(right.sampled), sampled, same))
    show(Sheet(("way", "right", "behind", "right, sampled", "behind", "same greedy text"), rows))


if __name__ == "__main__":
    run(main)

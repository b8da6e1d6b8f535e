"""How many questions a model answers right, as it is served and as transformers computes it in float32.

The engine answers as behind the server: weights, KV cache, batcher and sampler, in this process. transformers computes
the same files in float32, and its logits go through the same sampler. A drawn token depends on its seed and position
alone, so both draw by the same numbers, and what differs comes from the logits.

Greedily a question counts as answered where the answer stands in the text; sampled, where it stands in more than half
of the texts, of one seed each. Behind are the questions that transformers answers and the engine does not.
"""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from msgspec import structs
from transformers import AutoTokenizer, DynamicCache

from benchmarks.engine.in_process import ring_in, steps_of
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.model.card import end_tokens
from services.executor.model.tokenizer_files import read_json
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.config import load_settings
from shared.messages import GenerationRequest, SamplingParams

GREEDY = SamplingParams(temperature=0)
SEEDS = range(1, 4)
TOKENS = 24  # of an answer; a right one comes at its beginning
QUESTIONS = Path(__file__).with_suffix(".jsonl")


class Question(msgspec.Struct, frozen=True):
    question: str
    answers: list[str]  # words or numbers, any of which makes a text right

    def is_answered(self, text: str) -> bool:
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in self.answers)


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
    sampled: list[bool]  # in most of its texts

    def behind(self, first: "Right") -> tuple[int, int]:
        """Questions, greedily and sampled, that are answered in the first and not here."""
        pairs = ((first.greedy, self.greedy), (first.sampled, self.sampled))
        greedy, sampled = (sum(a and not b for a, b in zip(*pair, strict=True)) for pair in pairs)
        return greedy, sampled


def read_questions() -> list[Question]:
    return [msgspec.json.decode(line, type=Question) for line in QUESTIONS.read_bytes().splitlines()]


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
        self.stops = end_tokens(*(read_json(directory / name) for name in ("config.json", "generation_config.json")))
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
    with TemporaryDirectory() as scratch, closing(ring_in(Path(scratch), loaded)) as engine:
        spec = engine.load(lambda done, total: None)
        batcher = Scheduler(spec, BatchSettings())
        for request in requests:
            batcher.add(request)
        for step in steps_of(batcher, engine.execute):
            for entry in step.entries:
                said[entry.generation_id] += entry.tokens
    return asked.texts(list(said.values()))


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
    active = [*range(count * ways)]  # rows whose texts have not ended: of each question one for each way
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
    said = model(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    logits: torch.Tensor = said.logits[:, -1].float()
    return logits

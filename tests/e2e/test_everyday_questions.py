"""What the built-in model answers as it is served by default: everyday questions, and the quick start's own."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.executor.model.tokenizer_files import read_json
from shared.messages import SamplingParams
from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.everyday_questions import Asked, by_engine, by_transformers, read_questions
from tests.e2e.reference import load_reference
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
TIMES = 10  # that the quick start's question is asked


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_of_forty_questions_at_most_one_is_answered_worse_than_in_float32(model_directory: Path) -> None:
    """Greedily, and sampled by the model's defaults; transformers has the file's own weights."""
    said = read_json(model_directory / "generation_config.json")
    own = SamplingParams(temperature=said["temperature"], top_p=said["top_p"])
    asked = Asked(model_directory, read_questions(), own)
    assert len(asked.questions) == 40
    exact = by_transformers(asked, load_reference(model_directory)).right(asked.questions)
    assert sum(exact.greedy) > 35, "they are questions that the model can answer"
    greedy, sampled = by_engine(asked).right(asked.questions).behind(exact)
    assert greedy <= 1
    assert sampled <= 1


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[openai.OpenAI]:
    """Of a stack as `ryzanstein up` starts it without options."""
    with (
        Stack(tmp_path_factory.mktemp("default")) as stack,
        httpx.Client(trust_env=False, timeout=120) as http,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        yield client


def test_the_question_of_the_quick_start_is_answered_each_time(client: openai.OpenAI) -> None:
    """Asked as the pages ask it: streamed, and sampled by the model's defaults."""
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    (question,) = {*re.findall(r'"role": "user", "content": "(.+?)"', pages)}
    (known,) = (one for one in read_questions() if one.question == question)
    texts = [asked(client, question) for _ in range(TIMES)]
    assert [text for text in texts if not known.is_answered(text)] == []


def test_a_near_tie_falls_as_in_float32(client: openai.OpenAI) -> None:
    """With activations rounded to int8 the answer begins in French."""
    assert "Paris" in asked(client, "What is the capital of France?", temperature=0, max_tokens=24)


def asked(client: openai.OpenAI, question: str, **more: Any) -> str:
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": question}], stream=True, **more
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

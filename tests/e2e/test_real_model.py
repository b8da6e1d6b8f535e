"""The real model through the whole house, with the client that users have."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.model_store.catalog import DEFAULT_MODEL
from tests.e2e.reference import load_reference
from tests.e2e.stack import Stack
from tests.monitoring.observed import targets_of
from tests.monitoring.prometheus import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
PROMPTS = [
    f"Tell me one fact about {topic}."
    for topic in ("the sea", "bread", "the moon", "bees", "glass", "rivers", "Rome", "winter")
]
Connect = Callable[[Stack], openai.OpenAI]


def answer(
    client: openai.OpenAI, prompt: str, max_tokens: int = 32, *, temperature: float = 0, seed: int | None = None
) -> str:
    reply = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": prompt}],
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
    )
    return reply.choices[0].message.content or ""


def reference(directory: Path, prompts: list[str], max_tokens: int = 32) -> list[str]:
    """What transformers' own generate says, greedily, in fp32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    model = load_reference(directory)
    texts = []
    for prompt in prompts:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        texts.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_the_official_client_streams_sensible_english(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 5, "it came in pieces"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_session_stays_on_its_group_and_reuses_its_cache(client: openai.OpenAI, two_groups: Stack) -> None:
    messages = [{"role": "user", "content": "Here is a list of words: " + "tree river stone cloud " * 20}]
    groups = []
    previous = 0
    for turn in range(3):
        request_id = f"session-turn-{turn}"
        reply = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
            extra_headers={"X-Session-ID": "a-session", "x-request-id": request_id},
        )
        groups.append(two_groups.group_of(request_id))
        details = reply.usage.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details else 0
        assert cached >= previous // 16 * 16 - 16, "all full blocks of the turn before"
        previous = reply.usage.prompt_tokens
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content or ""},
            {"role": "user", "content": "Go on."},
        ]
    assert len(groups[0]) == 1
    assert groups == [groups[0]] * 3


def connect_async(stack: Stack) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False, timeout=120)
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=http)


async def test_requests_at_the_same_time_are_spread_over_the_groups(two_groups: Stack) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> set[str]:
        await client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": f"{number} is my number."}],
            max_tokens=4,
            extra_headers={"x-request-id": f"spread-{number}"},
        )
        return two_groups.group_of(f"spread-{number}")

    async with connect_async(two_groups) as client:
        groups = await asyncio.gather(*(ask(client, number) for number in range(8)))
    assert all(len(group) == 1 for group in groups)
    assert set.union(*groups) == {"executor-0", "executor-1"}


@pytest.mark.nightly
async def test_concurrent_requests_say_what_they_say_alone(two_groups: Stack) -> None:
    client = connect_async(two_groups)

    async def ask(prompt: str) -> str:
        reply = await client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=32,
            extra_headers={"X-Session-ID": "all-on-one-group"},
        )
        return reply.choices[0].message.content or ""

    async with client:
        alone = [await ask(prompt) for prompt in PROMPTS]
        together = await asyncio.gather(*map(ask, PROMPTS))
    assert together == alone


def test_one_rank_two_ranks_and_transformers_say_the_same(
    connect: Connect, two_groups: Stack, one_ring_of_two: Stack, model_directory: Path
) -> None:
    one, two = connect(two_groups), connect(one_ring_of_two)
    expected = reference(model_directory, PROMPTS[:4])
    assert [answer(one, prompt) for prompt in PROMPTS[:4]] == expected
    assert [answer(two, prompt) for prompt in PROMPTS[:4]] == expected


async def test_a_ring_tells_how_much_of_a_step_is_communication(one_ring_of_two: Stack) -> None:
    (target,) = (await targets_of(one_ring_of_two))["ryzanstein-executor"]
    async with connect_async(one_ring_of_two) as client, httpx.AsyncClient(trust_env=False) as http:
        await client.completions.create(model=DEFAULT_MODEL, prompt="The sea is", max_tokens=24)
        text = (await http.get(f"http://{target}/metrics")).text
    values = {
        sample.name.removeprefix("ryzanstein_executor_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert 0 < values["communication_seconds_total"] < values["step_seconds_total"]
    assert values["step_duration_seconds_sum"] == pytest.approx(values["step_seconds_total"], rel=1e-3)
    assert values["steps_total"] == values["step_duration_seconds_count"] == values["batch_size_count"] > 0


@pytest.mark.nightly
def test_vectors_are_those_of_transformers(
    connect: Connect, two_groups: Stack, one_ring_of_two: Stack, model_directory: Path
) -> None:
    """Through the whole house, one rank and two, a text that comes in chunks among them."""
    import torch
    from transformers import AutoTokenizer

    texts = [*PROMPTS[:3], "A long story of the sea. " * 150]
    tokenizer = AutoTokenizer.from_pretrained(str(model_directory))
    model = load_reference(model_directory, "AutoModel")
    for stack in (two_groups, one_ring_of_two):
        made = connect(stack).embeddings.create(model=DEFAULT_MODEL, input=texts)
        for text, item in zip(texts, made.data, strict=True):
            with torch.inference_mode():
                states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            last = states[-1] / states[-1].norm()
            assert (torch.tensor(item.embedding) - last).abs().max() < 1e-4


def test_no_text_ends_before_it_may(client: openai.OpenAI) -> None:
    short = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=60)
    assert short.choices[0].finish_reason == "stop"
    least = short.usage.completion_tokens + 5
    longer = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=least + 20, extra_body={"min_tokens": least}
    )
    assert longer.usage.completion_tokens >= least
    assert (longer.choices[0].message.content or "").startswith(short.choices[0].message.content or "?")


@pytest.mark.nightly
def test_a_repeated_text_comes_several_tokens_at_a_time(
    connect: Connect, two_groups: Stack, one_ring_of_two: Stack, model_directory: Path
) -> None:
    """Speculation: the text, its tokens and their log probabilities are all there, in fewer pieces."""
    prompt = (
        "Repeat this text word for word: The miller stood at the edge of the lake, where the road turns north. "
        "Every morning the baker came by with a basket of bread, and every evening he went home without it."
    )
    [expected] = reference(model_directory, [prompt], max_tokens=64)
    for stack in (two_groups, one_ring_of_two):
        stream = connect(stack).chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=64,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(piece.delta.content or "" for piece in pieces) == expected
        scored = [score for piece in pieces if piece.logprobs for score in piece.logprobs.content or []]
        assert "".join(score.token for score in scored) == expected
        assert len(scored) > 30
        assert len(pieces) < 0.8 * len(scored)


def test_seeded_sampling_does_not_depend_on_the_ring(
    connect: Connect, two_groups: Stack, one_ring_of_two: Stack
) -> None:
    texts = set()
    for stack in (two_groups, one_ring_of_two, two_groups):
        reply = connect(stack).chat.completions.create(
            model=DEFAULT_MODEL, messages=QUESTION, temperature=0.9, seed=7, max_tokens=24
        )
        texts.add(reply.choices[0].message.content)
    assert len(texts) == 1


@pytest.mark.parametrize(("temperature", "seed"), [pytest.param(0.0, None, marks=pytest.mark.nightly), (0.9, 7)])
def test_a_killed_rank_comes_back_and_the_answer_is_whole(
    connect: Connect, one_ring_of_two: Stack, temperature: float, seed: int | None
) -> None:
    """The ring is lost in the middle of an answer; the answer is the one it would have been."""
    client = connect(one_ring_of_two)
    prompt = "Write a long story about a lighthouse."
    expected = answer(client, prompt, max_tokens=60, temperature=temperature, seed=seed)
    before = one_ring_of_two.status()["groups"][0]
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=60,
        stream=True,
        temperature=temperature,
        seed=seed,
    )
    parts: list[str] = []
    for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        if len(parts) == 10:
            os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    assert "".join(parts) == expected
    after = one_ring_of_two.status()["groups"][0]
    assert {rank["pid"] for rank in after["ranks"]}.isdisjoint(rank["pid"] for rank in before["ranks"])
    assert answer(client, prompt, max_tokens=60, temperature=temperature, seed=seed) == expected


def test_gone_client_frees_its_place(client: openai.OpenAI, two_groups: Stack) -> None:
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Count for ever."}],
        max_tokens=4000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    # The record lags behind: only once it shows the generation does its absence mean that it has ended.
    until(lambda: running(two_groups) >= 1, 30)
    stream.close()
    until(lambda: running(two_groups) == 0, 30)


def running(stack: Stack) -> int:
    return sum(group["running"] for group in stack.status()["groups"])

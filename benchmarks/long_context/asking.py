"""Asks an OpenAI-compatible endpoint: how long texts are in its model's tokens, and what it answers.

measure: two texts of known size ──▶ usage.prompt_tokens ──▶ characters a token, tokens of the frame
ask:     text and question, with `sparse_attention` or without ──▶ answer, usage, seconds
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Literal

import msgspec

from benchmarks.errors import BenchError
from benchmarks.harness import progress_bars
from benchmarks.long_context.tasks import Sample, noise
from benchmarks.serve.sse import Client
from shared.sparse_attention import WrongChoice, parse, read

Api = Literal["chat", "completions"]
DENSE = "dense"
PATIENCE = 3600.0
_INSTRUCTION = "Read the text, then answer the question about it in a few words."


class Answer(msgspec.Struct, frozen=True):
    """What came of one question asked in one way."""

    sample: Sample
    """Without its text."""
    choice: str
    score: float
    text: str
    seconds: float
    prompt_tokens: int = 0
    sparse_tokens: int = 0
    """Of prompt and answer."""
    error: str = ""
    """Why there is no answer; the score is 0 then, and counts nowhere."""


class Ruler(msgspec.Struct, frozen=True):
    """How characters become tokens."""

    characters_a_token: float
    frame: float
    """Tokens beside the text: instruction, question, the chat's form."""

    def characters(self, tokens: int, answer: int) -> int:
        """Of a text with which a prompt and an answer of so many tokens are `tokens` together."""
        return max(0, int((tokens - answer - self.frame) * self.characters_a_token))


def field_of(choice: str) -> object:
    """The request's `sparse_attention` of a choice on the command line. Raises `BenchError`."""
    if choice == DENSE:
        return False
    try:
        given = parse(choice)
        read(given)
    except WrongChoice as error:
        raise BenchError(f"--sparse {choice}: {error}.") from None
    return given


class Endpoint:
    """One model at one endpoint. Use as an asynchronous context manager."""

    def __init__(self, url: str, model: str, api: Api, key: str = "") -> None:
        """`model`: empty, the only one that is served."""
        self._client = Client(url, api_key=key or None, timeout=PATIENCE)
        self._path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        self._api = api
        self.model = model

    async def __aenter__(self) -> "Endpoint":
        if not self.model:
            served = (await self._client.ask("/v1/models"))["data"]
            if len(served) != 1:
                raise BenchError(f"{len(served)} models are served; name one with --model.")
            self.model = str(served[0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def measure(self) -> Ruler:
        """How many tokens texts such as these have. Raises `BenchError`."""
        counts = []
        for size in (1000, 3000):
            text = " ".join(noise(Random("ruler"), size))
            body = self._body(Sample("", 0, None, text, "What is it?", "It is", [""], 1)) | {"max_tokens": 1}
            counts.append((len(text), (await self._post(body))["usage"]["prompt_tokens"]))
        (short, few), (long, many) = counts
        if many <= few:
            raise BenchError(
                "The endpoint's usage has as many prompt tokens for a longer text; it cannot be measured."
            )
        each = (long - short) / (many - few)
        return Ruler(each, max(0.0, few - short / each))

    async def ask(self, sample: Sample, choice: str, *, tell: bool) -> Answer:
        """`tell`: send `sparse_attention`, which other servers than this one do not know."""
        body = self._body(sample) | ({"sparse_attention": field_of(choice)} if tell else {})
        bare = msgspec.structs.replace(sample, text="")
        began = time.perf_counter()
        try:
            found = await self._post(body)
        except BenchError as error:
            return Answer(bare, choice, 0.0, "", time.perf_counter() - began, error=str(error))
        seconds = time.perf_counter() - began
        usage, (first,) = found["usage"], found["choices"]
        text = str(first["message"]["content"] if self._api == "chat" else first["text"])
        sparse = _sparse_tokens(usage)
        return Answer(bare, choice, sample.score(text), text, seconds, usage["prompt_tokens"], sparse)

    async def ask_all(
        self, samples: Sequence[Sample], choices: Sequence[str], concurrency: int, *, tell: bool
    ) -> list[Answer]:
        """Every sample in every way, so many at a time; the ways of one sample one after the other."""
        places = asyncio.Semaphore(concurrency)
        with progress_bars() as progress:
            task = progress.add_task("asking", total=len(samples) * len(choices))

            async def ask(sample: Sample, choice: str) -> Answer:
                async with places:
                    answer = await self.ask(sample, choice, tell=tell)
                progress.advance(task)
                return answer

            return await asyncio.gather(*(ask(sample, choice) for sample in samples for choice in choices))

    def _body(self, sample: Sample) -> dict[str, Any]:
        asked = f"{_INSTRUCTION}\n\n{sample.text}\n\nQuestion: {sample.question}"
        fields: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": sample.max_tokens}
        if self._api == "chat":
            return fields | {"messages": [{"role": "user", "content": asked}]}
        return fields | {"prompt": f"{asked}\nAnswer: {sample.begin}"}

    async def _post(self, body: Mapping[str, Any]) -> Any:
        return await self._client.ask(self._path, body)


def _sparse_tokens(usage: Mapping[str, Any]) -> int:
    parts = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
    return sum(int(part.get("sparse_tokens") or 0) for part in parts)

"""Asks an OpenAI-compatible endpoint: how long texts are in its model's tokens, and what it answers.

measure: two texts of known size ──▶ usage.prompt_tokens ──▶ characters a token, tokens of the frame
ask:     text and question, with `sparse_attention` or without ──▶ answer, usage, seconds
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any, Literal

import httpx
import msgspec
from rich.console import Console
from rich.progress import track

from benchmarks.errors import BenchError
from benchmarks.long_context.tasks import Sample, noise
from shared.sparse_attention import WrongChoice, parse, read

Api = Literal["chat", "completions"]
DENSE = "dense"
PATIENCE = 3600.0
_INSTRUCTION = "Read the text, then answer the question about it in a few words."
_SHOWN = 300
"""Characters of an endpoint's refusal that are told."""


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
    """One model at one endpoint. Use as a context manager."""

    def __init__(self, url: str, model: str, api: Api, key: str = "") -> None:
        """`model`: empty, the only one that is served."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=PATIENCE, trust_env=False
        )
        self._api = api
        self.model = model

    def __enter__(self) -> "Endpoint":
        if not self.model:
            served = self._get("/v1/models")["data"]
            if len(served) != 1:
                raise BenchError(f"{len(served)} models are served; name one with --model.")
            self.model = str(served[0]["id"])
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def measure(self) -> Ruler:
        """How many tokens texts such as these have. Raises `BenchError`."""
        sizes = (1000, 3000)
        counts = []
        for size in sizes:
            text = " ".join(noise(Random("ruler"), size))
            body = self._body(Sample("", 0, None, text, "What is it?", "It is", [""], 1)) | {"max_tokens": 1}
            counts.append((len(text), self._post(body)["usage"]["prompt_tokens"]))
        (short, few), (long, many) = counts
        if many <= few:
            raise BenchError(
                "The endpoint's usage has as many prompt tokens for a longer text; it cannot be measured."
            )
        each = (long - short) / (many - few)
        return Ruler(each, max(0.0, few - short / each))

    def ask(self, sample: Sample, choice: str, *, tell: bool) -> Answer:
        """`tell`: send `sparse_attention`, which other servers than this one do not know."""
        body = self._body(sample) | ({"sparse_attention": field_of(choice)} if tell else {})
        bare = msgspec.structs.replace(sample, text="")
        began = time.perf_counter()
        try:
            found = self._post(body)
        except BenchError as error:
            return Answer(bare, choice, 0.0, "", time.perf_counter() - began, error=str(error))
        seconds = time.perf_counter() - began
        usage, (first,) = found["usage"], found["choices"]
        text = str(first["message"]["content"] if self._api == "chat" else first["text"])
        return Answer(
            bare, choice, sample.score(text), text, seconds, usage["prompt_tokens"], _sparse_tokens(usage)
        )

    def ask_all(
        self, samples: Sequence[Sample], choices: Sequence[str], concurrency: int, *, tell: bool
    ) -> list[Answer]:
        """Every sample in every way, so many at a time; the ways of one sample one after the other."""
        asked = [(sample, choice) for sample in samples for choice in choices]
        with ThreadPoolExecutor(concurrency) as pool:
            answers = pool.map(lambda one: self.ask(*one, tell=tell), asked)
            return list(track(answers, "asking", len(asked), console=Console(stderr=True), transient=True))

    def _body(self, sample: Sample) -> dict[str, Any]:
        asked = f"{_INSTRUCTION}\n\n{sample.text}\n\nQuestion: {sample.question}"
        fields: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": sample.max_tokens}
        if self._api == "chat":
            return fields | {"messages": [{"role": "user", "content": asked}]}
        return fields | {"prompt": f"{asked}\nAnswer: {sample.begin}"}

    def _post(self, body: Mapping[str, Any]) -> Any:
        path = "/v1/chat/completions" if self._api == "chat" else "/v1/completions"
        return _read(lambda: self._client.post(path, json=body))

    def _get(self, path: str) -> Any:
        return _read(lambda: self._client.get(path))


def _read(ask: Any) -> Any:
    try:
        answer: httpx.Response = ask()
    except httpx.HTTPError as error:
        raise BenchError(f"The endpoint does not answer: {error or type(error).__name__}.") from None
    try:
        found = answer.json()
    except ValueError:
        found = {"error": {"message": answer.text}}
    if answer.status_code != 200:
        refusal = found.get("error") if isinstance(found, dict) else None
        told = refusal.get("message") if isinstance(refusal, dict) else answer.text
        raise BenchError(f"The endpoint answers {answer.status_code}: {str(told)[:_SHOWN]}")
    return found


def _sparse_tokens(usage: Mapping[str, Any]) -> int:
    parts = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
    return sum(int(part.get("sparse_tokens") or 0) for part in parts)

"""The vector of an input, from the entry that brings it to OpenAI's response. Pure.

On its way through a `Run` it stands where other endpoints have text: base64 of float32, little-endian.
"""

import base64
import json
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.formats import ResponseSerializer, Usage
from services.gateway.streams.output import OutputDelta, OutputProcessor
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import TokenEntry


class VectorOutput(OutputProcessor):
    """There are no tokens."""

    def __init__(self, dimensions: int) -> None:
        """`dimensions` of the vector are wanted; 0: all."""
        self._dimensions = dimensions
        self._vector = b""

    def feed(self, entry: TokenEntry) -> None:
        if self.finish or entry.finish != "stop":
            return
        self._vector, self.finish = cut(entry.vector, self._dimensions), entry.finish

    def take(self) -> OutputDelta:
        """The vector, as often as it is asked for."""
        return OutputDelta(base64.b64encode(self._vector).decode(), ())


def cut(vector: bytes, dimensions: int) -> bytes:
    """The first `dimensions` numbers of `vector`, brought to length 1 again; 0: all, as they are."""
    if not dimensions or 4 * dimensions >= len(vector):
        return vector
    numbers = _numbers(vector[: 4 * dimensions])
    length = math.hypot(*numbers) or 1.0
    return _bytes(array("f", [number / length for number in numbers]))


def _numbers(vector: bytes) -> "array[float]":
    numbers = array("f")
    numbers.frombytes(vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _bytes(numbers: "array[float]") -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def floats_of(text: str) -> list[float]:
    """The numbers of a vector as a `OutputDelta` has it."""
    return _numbers(base64.b64decode(text)).tolist()


def text_of(numbers: Iterable[float]) -> str:
    """`numbers` as a `OutputDelta` has a vector."""
    return base64.b64encode(_bytes(array("f", numbers))).decode()


def octets_of(whole: bytes, named: Mapping[str, Any]) -> tuple[bytes, str]:
    """The vectors of `whole`, a response that has them in base64, one behind the other; and as JSON what else it says,
    and `named`, with the place of each vector in place of it, as vLLM tells them."""
    answer = msgspec.json.decode(whole)
    vectors = [base64.b64decode(item.get("embedding") or item["data"]) for item in answer["data"]]
    ends = list(accumulate(map(len, vectors)))
    places = [
        {
            "index": item["index"],
            "embed_dtype": "float32",
            "endianness": "little",
            "start": end - len(vector),
            "end": end,
            "shape": [len(vector) // 4],
        }
        for item, vector, end in zip(answer["data"], vectors, ends, strict=True)
    ]
    return b"".join(vectors), json.dumps({**named, **answer, "data": places})


class _Embedding(msgspec.Struct, frozen=True, tag_field="object", tag="embedding"):
    index: int
    embedding: str | list[float]


def vector_outputs(answer: RequestState) -> list[OutputProcessor]:
    """Of each input."""
    return [VectorOutput(answer.record.dimensions) for _ in answer.generations]


class VectorFormat(ResponseSerializer):
    """A list of embeddings. There is nothing to stream."""

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(vector_outputs(answer))
        self._record = answer.record

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        """One that has not come yet is left out."""
        data = [  # each encoded apart: a thread that does it lets others work in between
            msgspec.Raw(msgspec.json.encode(_Embedding(index, self._shown(choice.text))))
            for index, choice in enumerate(choices)
            if choice.finish
        ]
        counted = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
        return msgspec.json.encode(
            {"object": "list", "data": data, "model": self._record.model_shown, "usage": counted}
        )

    def _shown(self, text: str) -> str | list[float]:
        return text if self._record.base64 else floats_of(text)

"""Scores, from the vectors of a request's entries to the responses of Jina, Cohere and vLLM. Pure.

classes    logits                       ──▶ sigmoid, softmax or as they are
answers    log p(yes), log p(no)        ──▶ p(yes) / (p(yes) + p(no))
vectors    of a query and a document    ──▶ the cosine of their angle
"""

import math
from collections.abc import Sequence
from operator import mul
from typing import Any

import msgspec

from services.gateway.lifecycle.request_state import RequestState
from services.gateway.streams.embeddings import floats_of, text_of, vector_outputs
from services.gateway.streams.formats import ResponseSerializer, Usage
from services.gateway.streams.output import OutputDelta
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages.records import Scoring

_MOST = 700.0  # exp of more is none of the numbers that there are


def probabilities(logits: Sequence[float], activation: str) -> list[float]:
    """Of classes. `activation`: `ModelCard.activation`; of a single class softmax says nothing, so it is sigmoid."""
    if activation == "identity":
        return list(logits)
    if activation == "softmax" and len(logits) > 1:
        largest = max(logits)
        powers = [math.exp(logit - largest) for logit in logits]
        total = sum(powers)
        return [power / total for power in powers]
    return [_sigmoid(logit) for logit in logits]


def answered(yes: float, no: float) -> float:
    """The probability of yes where it is yes or no; of their log probabilities."""
    return _sigmoid(yes - no)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Of the angle between two vectors; 0 where one has no direction."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return sum(map(mul, first, second)) / lengths if lengths else 0.0


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(min(_MOST, -logit)))


class ScoringFormat(ResponseSerializer):
    """What the three have in common. There is nothing to stream; a score that has not come yet is left out."""

    def __init__(self, answer: RequestState, tokenizer: Tokenizer) -> None:
        super().__init__(vector_outputs(answer))
        self._answer, self._record = answer, answer.record
        self._scoring = answer.record.scoring or Scoring("classes")

    def scores(self, choices: Sequence[OutputDelta]) -> list[tuple[int, float]]:
        """Those that have come, each with its document's index."""
        queries, way = self._scoring.queries, self._scoring.way
        vectors = [floats_of(choice.text) if choice.finish else None for choice in choices]
        found = []
        for index, vector in enumerate(vectors[queries:]):
            if vector is None:
                continue
            if way == "vectors":
                query = vectors[index if queries > 1 else 0]
                if query is not None:
                    found.append((index, cosine(query, vector)))
            elif way == "answers":
                found.append((index, answered(vector[0], vector[1])))
            else:
                found.append((index, probabilities(vector, self._scoring.activation)[0]))
        return found

    def text_of(self, index: int) -> str | None:
        """Of the document at `index`; None: it is not shown."""
        return self._record.texts[self._scoring.queries + index] if self._record.texts else None

    def listed(self, data: Sequence[dict[str, Any]], usage: Usage) -> bytes:
        """vLLM's list of them."""
        return msgspec.json.encode(
            {
                "id": self._answer.public_id,
                "object": "list",
                "created": int(self._record.created),
                "model": self._record.model_shown,
                "data": data,
                "usage": _counted(usage) | {"completion_tokens": 0, "prompt_tokens_details": None},
            }
        )


def _counted(usage: Usage) -> dict[str, Any]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


class RankingFormat(ScoringFormat):
    """Jina's and Cohere's: the best documents first, of equals the earlier."""

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        ranked = sorted(self.scores(choices), key=lambda scored: -scored[1])
        if self._scoring.top_n:
            ranked = ranked[: self._scoring.top_n]
        results = []
        for index, score in ranked:
            text = self.text_of(index)
            shown: dict[str, Any] = {"index": index, "relevance_score": score}
            results.append(shown if text is None else shown | {"document": {"text": text}})
        return msgspec.json.encode(
            {
                "id": self._answer.public_id,
                "model": self._record.model_shown,
                "results": results,
                "usage": _counted(usage),
                "meta": {"tokens": {"input_tokens": usage.prompt_tokens, "output_tokens": 0}},
            }
        )


class ScoresFormat(ScoringFormat):
    """vLLM's, in the order of the pairs."""

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        data = [{"index": index, "object": "score", "score": score} for index, score in self.scores(choices)]
        return self.listed(data, usage)


class PoolingFormat(ScoringFormat):
    """vLLM's: of each input its vector, or the probabilities of all classes."""

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        data = [
            {"index": index, "object": "pooling", "data": self._shown(choice.text)}
            for index, choice in enumerate(choices)
            if choice.finish
        ]
        return self.listed(data, usage)

    def _shown(self, text: str) -> str | list[float]:
        if (scoring := self._record.scoring) is not None:
            text = text_of(probabilities(floats_of(text), scoring.activation))
        return text if self._record.base64 else floats_of(text)


class ClassesFormat(ScoringFormat):
    """vLLM's: of each input the likeliest class, and the probabilities of all."""

    def whole(self, choices: Sequence[OutputDelta], usage: Usage) -> bytes:
        data = []
        for index, choice in enumerate(choices):
            if not choice.finish:
                continue
            shown = probabilities(floats_of(choice.text), self._scoring.activation)
            best = max(range(len(shown)), key=shown.__getitem__)
            data.append(
                {"index": index, "label": self._scoring.labels[best], "probs": shown, "num_classes": len(shown)}
            )
        return self.listed(data, usage)

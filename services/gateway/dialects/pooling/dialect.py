"""Embeddings as OpenAI has them, ranks as Jina and Cohere, scores, classes and pooling as vLLM: endpoints whose answers
are vectors, or made of them."""

from typing import Any, ClassVar

import msgspec

from services.gateway.api.dialect import Dialect
from services.gateway.dialects.pooling.formats import ClassesFormat, PoolingFormat, RankingFormat, ScoresFormat
from services.gateway.dialects.pooling.records import scoring_record
from services.gateway.dialects.pooling.routes import pooling_routes
from services.gateway.dialects.pooling.schemas import (
    ClassifyRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringRequest,
    classes_wanted,
    pairs_of,
)
from services.gateway.intake.decoding import decode
from services.gateway.intake.endpoint import BodyEndpoint
from services.gateway.intake.headers import IgnoredFields
from services.gateway.intake.processor import InputProcessor
from services.gateway.intake.prompts import embeddings
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.record import Context, run_of
from services.gateway.streams.embeddings import VectorFormat
from services.gateway.streams.stream_reader import StreamReader
from shared import tracing


async def _scored(processor: InputProcessor, request: ScoringRequest, context: Context, **shown: Any) -> StreamReader:
    """`shown`: fields of the record that say how it is shown, where that is not as scores are."""
    _check(request)
    card = await processor.loaded(request, context)
    card = processor.resolve(request.model, card, context)
    tokenizer = await processor.tokenizer_of(card, context.tenant)
    with tracing.stage("tokenize"):
        record = await scoring_record(request, card, tokenizer, context, processor.parts)
    if shown:
        record = msgspec.structs.replace(record, **shown)
    cost = sum(len(one.prompt) for one in record.requests)
    return run_of(record, cost, card, tokenizer, context, processor.parts)


def _check(request: ScoringRequest) -> None:
    if isinstance(request, ClassifyRequest):
        embeddings.inputs_of(EmbeddingRequest(model=request.model, input=request.input))
    else:
        pairs_of(request)


class _PoolingEndpoint(BodyEndpoint):
    generates = False
    request: ClassVar[msgspec.json.Decoder[Any]]

    def decode(self, body: bytes | msgspec.Raw, ignored: IgnoredFields) -> Any:
        return decode(body, self.request)


class _ScoringEndpoint(_PoolingEndpoint):
    def check(self, request: ScoringRequest, ignored: IgnoredFields) -> None:
        _check(request)

    async def prepare(self, processor: InputProcessor, request: ScoringRequest, context: Context) -> StreamReader:
        return await _scored(processor, request, context)


class RerankEndpoint(_ScoringEndpoint):
    """/v1/rerank."""

    name = "rerank"
    presentation = RankingFormat
    request = msgspec.json.Decoder(RerankRequest)
    invoked_by = ("query",)


class ScoreEndpoint(_ScoringEndpoint):
    """/v1/score."""

    name = "score"
    presentation = ScoresFormat
    request = msgspec.json.Decoder(ScoreRequest)
    invoked_by = ("queries", "text_1")


class ClassifyEndpoint(_ScoringEndpoint):
    """/v1/classify."""

    name = "classify"
    presentation = ClassesFormat
    request = msgspec.json.Decoder(ClassifyRequest)


class _VectorEndpoint(_PoolingEndpoint):
    def check(self, request: EmbeddingRequest, ignored: IgnoredFields) -> None:
        embeddings.inputs_of(request)


class EmbeddingsEndpoint(_VectorEndpoint):
    """/v1/embeddings."""

    name = "embeddings"
    presentation = VectorFormat
    nameless = True
    request = msgspec.json.Decoder(EmbeddingRequest)
    invoked_by = ("input",)

    async def prepare(self, processor: InputProcessor, request: EmbeddingRequest, context: Context) -> StreamReader:
        return await processor.embedding(request, context)


class PoolEndpoint(_VectorEndpoint):
    """/pooling."""

    name = "pooling"
    presentation = PoolingFormat
    request = msgspec.json.Decoder(PoolingRequest)

    async def prepare(self, processor: InputProcessor, request: PoolingRequest, context: Context) -> StreamReader:
        embeddings.inputs_of(request)
        classes = classes_wanted(request, await processor.loaded(request, context))
        if classes is None:
            return await processor.embedding(request, context, "pooling")
        form = embeddings.encoding_of(request)
        return await _scored(processor, classes, context, endpoint="pooling", **form)


POOLING = Dialect(
    "pooling",
    pooling_routes,
    endpoints=(RerankEndpoint(), ScoreEndpoint(), ClassifyEndpoint(), PoolEndpoint(), EmbeddingsEndpoint()),
)

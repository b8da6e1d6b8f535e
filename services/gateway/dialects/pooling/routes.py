"""POST /v1/embeddings, /v1/rerank, /v1/score and /v1/classify, also under the other paths that clients know them by."""

from functools import partial
from typing import Literal

import msgspec

from services.gateway.api import shapes
from services.gateway.api.generating import completions
from services.gateway.api.openapi.operation import OCTETS, generating
from services.gateway.dialects.pooling.schemas import ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest
from services.gateway.intake.prompts.embeddings import EmbeddingRequest


class ScoringUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ShownDocument(msgspec.Struct):
    text: str


class RankedDocument(msgspec.Struct):
    index: int  # of the document in the request
    relevance_score: float
    document: ShownDocument | msgspec.UnsetType = msgspec.UNSET


class CountedTokens(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class RankingMeta(msgspec.Struct):
    """Cohere's count of the same tokens."""

    tokens: CountedTokens


class Ranking(msgspec.Struct):
    """The best documents first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoringUsage
    meta: RankingMeta


class ListUsage(ScoringUsage):
    completion_tokens: int
    prompt_tokens_details: None


class PairScore(msgspec.Struct):
    index: int
    object: Literal["score"]
    score: float


class Scores(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: ListUsage


class InputClasses(msgspec.Struct):
    index: int
    label: str  # of the likeliest class
    probs: list[float]  # of all classes, in the model's order
    num_classes: int


class Classes(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[InputClasses]
    usage: ListUsage


class PooledInput(msgspec.Struct):
    index: int
    object: Literal["pooling"]
    data: list[float] | str  # a vector, or the probabilities of all classes


class PooledInputs(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledInput]
    usage: ListUsage


EMBEDDINGS = generating(
    "POST /v1/embeddings",
    "createEmbedding",
    "Texts in, vectors out.",
    request=EmbeddingRequest,
    example={"model": "SmolLM2-135M-Instruct", "input": ["One text.", "Another."]},
    response=shapes.EmbeddingList,
    response_content=OCTETS,
    tag="Embeddings",
)
_scores = partial(generating, tag="Scores")
RERANK = tuple(
    _scores(
        f"POST {path}",
        name,
        "Documents ranked by how well they answer a query, as Jina and Cohere have it.",
        "With a cross-encoder, a language model that is asked for yes or no, or an embedder.",
        request=RerankRequest,
        example={
            "model": "BAAI/bge-reranker-v2-m3",
            "query": "What is the capital of France?",
            "documents": ["Bread is baked.", "Paris is the capital of France."],
            "top_n": 1,
        },
        response=Ranking,
    )
    for path, name in (("/v1/rerank", "createRerank"), ("/rerank", "rerank"), ("/v2/rerank", "rerankV2"))
)
SCORE = tuple(
    _scores(
        f"POST {path}",
        name,
        "Scores of pairs of texts, as in vLLM.",
        "One text with one, one with each of several, or several with as many.",
        request=ScoreRequest,
        example={
            "model": "BAAI/bge-reranker-v2-m3",
            "text_1": "What is the capital of France?",
            "text_2": ["Bread is baked.", "Paris is the capital of France."],
        },
        response=Scores,
    )
    for path, name in (("/v1/score", "createScore"), ("/score", "score"))
)
CLASSIFY = tuple(
    _scores(
        f"POST {path}",
        name,
        "Texts in, the probabilities of their classes out, as in vLLM.",
        request=ClassifyRequest,
        example=EMBEDDINGS.example,
        response=Classes,
    )
    for path, name in (("/v1/classify", "createClassification"), ("/classify", "classify"))
)
POOLING = _scores(
    "POST /pooling",
    "pool",
    "What a model makes of texts, vectors or the probabilities of classes, as in vLLM.",
    request=PoolingRequest,
    example=EMBEDDINGS.example,
    response=PooledInputs,
    response_content=OCTETS,
)


pooling_routes = (
    completions("embeddings", EMBEDDINGS),
    completions("rerank", *RERANK),
    completions("score", *SCORE),
    completions("classify", *CLASSIFY),
    completions("pooling", POOLING),
)

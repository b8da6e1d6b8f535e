"""Bodies of rerank requests as Jina and Cohere have them, and of score, classify and pooling requests as vLLM has
them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidField, check_range
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.rules import NULL, OneOf, Rule, Ruled, equal, neutral
from services.gateway.intake.schemas import Count, LastTokens, ModelName, PositiveCount, Priority, User
from services.gateway.intake.validation import check_fields, check_truncation
from shared import limits
from shared.messages import ModelCard

Text = Annotated[str, Meta(min_length=1)]
_Texts = Annotated[list[Text], limits.SCORED_TEXTS.length(min_length=1)]


class _Fields(Ruled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the three have in common."""

    model: ModelName
    # vLLM's: so many tokens of each prompt, a pair's both texts together; the end of the document goes.
    truncate_prompt_tokens: LastTokens | None = None
    use_activation: bool | None = None  # vLLM's: false shows the logits of classes as they are
    priority: Priority | None = None
    user: User | None = None


class _Compared(_Fields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    # vLLM's: by what a language model judges, in place of its template's own words.
    instruction: Text | None = None


class TextDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: Text


class RerankRequest(_Compared, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/rerank, /rerank and /v2/rerank."""

    query: Text
    documents: Annotated[list[Text | TextDocument], limits.SCORED_TEXTS.length(min_length=1)]
    # So many of the documents, the best ones, or as many as there are; left out or 0: all.
    top_n: Count | None = None
    # Whether results have the documents' texts; true where it is left out.
    return_documents: bool | None = None
    # So many tokens of each document, its first ones; left out: a document that is too long is refused.
    max_tokens_per_doc: PositiveCount | None = None
    max_chunks_per_doc: Annotated[Any, neutral()] = None
    rank_fields: Annotated[Any, neutral()] = None
    relevant_spans: Annotated[Any, neutral()] = None


class ScoreRequest(_Compared, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/score and /score: `text_1` and `text_2`, or the same as `queries` and `documents`. One with one, one
    with each of several, or several with as many."""

    text_1: Text | _Texts | None = None
    text_2: Text | _Texts | None = None
    queries: Text | _Texts | None = None
    documents: Text | _Texts | None = None

    rules = (
        OneOf(
            ways=(("text_1", "text_2"), ("queries", "documents")),
            lacks="Missing required parameter: '{field}'; send 'text_1' and 'text_2', or 'queries' and 'documents'.",
            repeats="Invalid '{field}': it repeats 'text_1' and 'text_2'; send one of the two pairs.",
        ),
    )


class ClassifyRequest(_Fields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/classify and /classify. `input`: a string, strings, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]


# These have no meaning where the probabilities of classes are wanted, also because the model gives nothing else.
NO_VECTORS = Rule(
    field="task",
    when=equal("classify"),
    needs=dict.fromkeys(
        (
            *("messages", "add_generation_prompt", "chat_template_kwargs"),
            *("dimensions", "prompt_name", "truncation_side"),
        ),
        NULL,
    ),
    error="Unsupported parameter: '{field}' is not supported by this server; {model} gives the probabilities of "
    "classes; leave it out.",
    reason="unsupported_parameter",
    param="{field}",
)


class PoolingRequest(EmbeddingRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /pooling: what a model makes of an input, whether that is a vector or the probabilities of classes."""

    task: Literal["embed", "classify"] | None = None  # left out: what the model does
    use_activation: Annotated[Any, neutral(True, why="/v1/classify shows logits")] = None

    rules = (*EmbeddingRequest.rules, NO_VECTORS)


def classes_wanted(request: PoolingRequest, card: ModelCard) -> ClassifyRequest | None:
    """As what `request` is served; None: vectors are wanted. Raises `InvalidParameter`."""
    check_fields(request)
    alone = card.does("classify") and not card.does("embed")
    if (request.task or ("classify" if alone else "embed")) == "embed":
        return None
    NO_VECTORS.check(msgspec.structs.replace(request, task="classify"), model=card.model)
    return ClassifyRequest(
        model=request.model,
        input=request.input or "",
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        user=request.user,
    )


Scored = RerankRequest | ScoreRequest
ScoringRequest = RerankRequest | ScoreRequest | ClassifyRequest


class Pairs(msgspec.Struct, frozen=True):
    """What is compared: one query with every document, or each with its own."""

    queries: list[str]
    documents: list[str]
    query_field: str
    document_field: str

    def query_of(self, index: int) -> str:
        """Of the document at `index`."""
        return self.queries[index if len(self.queries) > 1 else 0]

    def named(self, index: int) -> str:
        """The document at `index`, as errors name it."""
        return f"{self.document_field}[{index}]"


def pairs_of(request: Scored) -> Pairs:
    """The texts of a request, within their bounds. Raises `InvalidParameter` for the first thing wrong in
    `request`, as far as that needs no model."""
    check_fields(request)
    pairs = _ranked(request) if isinstance(request, RerankRequest) else _scored(request)
    queries = sum(len(pairs.query_of(index)) for index in range(len(pairs.documents)))
    instructions = len(request.instruction or "") * len(pairs.documents)
    check_characters(pairs, queries + instructions + sum(map(len, pairs.documents)))
    return pairs


def check_characters(pairs: Pairs, characters: int) -> None:
    """Raises `InvalidParameter` where the prompts of all pairs together have too many `characters`."""
    most = limits.SCORED_CHARACTERS
    if characters > most.value:
        raise InvalidField(
            pairs.document_field,
            f"with the query, the instruction and the model's template around each "
            f"of them they have {characters:,} characters; send fewer at a time ({most.cited()}).",
            reason="string_above_max_length",
        )


def _ranked(request: RerankRequest) -> Pairs:
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    return Pairs([request.query], documents, "query", "documents")


def _scored(request: ScoreRequest) -> Pairs:
    names = ("queries", "documents") if request.text_1 is None else ("text_1", "text_2")
    given = (getattr(request, name) for name in names)
    queries, documents = ([one] if isinstance(one, str) else one for one in given)
    if len(queries) not in (1, len(documents)):
        raise InvalidField(
            names[0],
            f"{len(queries)} texts cannot be paired with {len(documents)}; send one, or as many as in '{names[1]}'.",
        )
    return Pairs(queries, documents, *names)


def check_lengths(request: ScoringRequest, card: ModelCard) -> None:
    """Raises `InvalidParameter` where more tokens are asked for than the model reads, or none."""
    if request.truncate_prompt_tokens is not None:
        check_truncation(request.truncate_prompt_tokens)
        check_range("truncate_prompt_tokens", request.truncate_prompt_tokens, -1, card.context_length)

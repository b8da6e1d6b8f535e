"""Pairs and texts to prompts whose vectors become scores, in the way that the model can.

    a classifier with one class     one prompt per pair, as its tokenizer joins two texts     ──▶ a logit
    a language model                one chat per pair: does the document answer the query?    ──▶ yes and no
    an embedder                     one prompt per text                                       ──▶ vectors

A language model whose files have sentence-transformers' prompts was trained to embed, and is used so. The chat is what
the model's chat template makes of messages with the roles `query` and `document`, as vLLM and sentence-transformers
have it ("Score Template", https://docs.vllm.ai), also of a classifier's. A template that knows no such roles shows the
chat that Qwen3-Reranker was trained with ("Qwen3 Embedding", arXiv:2506.05176).
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from services.gateway.core.errors import InvalidField, InvalidParameter
from services.gateway.dialects.pooling.schemas import ClassifyRequest, Pairs, RerankRequest, Scored, check_characters
from services.gateway.intake.prompts.embeddings import EmbeddingRequest, check_length, cut_tokens, inputs_of, prompts_of
from services.gateway.intake.validation import check_task, check_text
from services.gateway.tokenizer.templates import TemplateOptions
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared.messages import ModelCard

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
# Stand for a pair's texts while the chat is rendered: they have no special token's text.
_QUERY, _DOCUMENT, _INSTRUCTION = (f"RYZANSTEIN-{name}" for name in ("QUERY", "DOCUMENT", "INSTRUCTION"))
_MOST_PARTS = 15  # of a chat; a template may show the query and the instruction more than once
_PLACES = re.compile(f"({_QUERY}|{_DOCUMENT}|{_INSTRUCTION})")

Way = Literal["classes", "answers", "vectors"]


class Prompt(NamedTuple):
    """Of one generation."""

    tokens: list[int]
    second_segment: int = 0  # `GenerationRequest.second_segment`


class Prompts(NamedTuple):
    """Of all generations of a request, and how they become scores."""

    way: Way
    prompts: list[Prompt]
    answers: Sequence[int] = ()  # the tokens yes and no


async def score_prompts(
    request: Scored, pairs: Pairs, tokenizer: Tokenizer, card: ModelCard, prompt_limit: int
) -> Prompts:
    """Raises `InvalidParameter`, `ContextLengthExceeded`, both with what is wrong; `QueueFull`."""
    maker = _Maker(request, pairs, tokenizer, card, prompt_limit)
    maker.check_sizes()
    if card.does("classify"):
        if len(card.labels) > 1:
            raise _unfit(card, f"has {len(card.labels)} classes, and a reranker has one; use /v1/classify")
        return await (maker.chats("classes") if tokenizer.traits.pairs else maker.classes())
    if card.does("generate") and not card.prompts and (answers := await _answers(tokenizer)):
        return await maker.chats("answers", answers)
    if card.does("embed"):
        return await maker.vectors()
    if card.does("generate"):
        raise _unfit(card, "has no chat template, or no single tokens for yes and no; choose a reranker")
    check_task(card, "classify")
    raise AssertionError("unreachable: the model does none of the tasks")


async def class_prompts(request: ClassifyRequest, tokenizer: Tokenizer, card: ModelCard, prompt_limit: int) -> Prompts:
    """As `score_prompts`, of single texts."""
    check_task(card, "classify")
    texts = EmbeddingRequest(
        model=request.model, input=request.input, truncate_prompt_tokens=request.truncate_prompt_tokens
    )
    prompts = await prompts_of(texts, inputs_of(texts), tokenizer, card, prompt_limit)
    return Prompts("classes", list(map(Prompt, prompts)))


async def _answers(tokenizer: Tokenizer) -> list[int]:
    """The tokens yes and no; empty: the model has no such tokens, or cannot be asked."""
    if not tokenizer.chats:
        return []
    yes, no = await tokenizer.encode_parts([["yes"], ["no"]])
    return [*yes, *no] if len(yes) == len(no) == 1 else []


class _Maker:
    """Of one request."""

    def __init__(self, request: Scored, pairs: Pairs, tokenizer: Tokenizer, card: ModelCard, prompt_limit: int) -> None:
        self._pairs = pairs
        self._tokenizer = tokenizer
        self._card = card
        self._prompt_limit = prompt_limit
        self._most = min(card.context_length, prompt_limit or card.context_length)
        self._cut_to = request.truncate_prompt_tokens or 0
        self._instruction = request.instruction or ""
        self._of_document = request.max_tokens_per_doc if isinstance(request, RerankRequest) else None

    def check_sizes(self) -> None:
        """Refuses before they are tokenized texts that are too long by their size alone. Raises
        `ContextLengthExceeded`."""
        for name, texts, cut in (
            (self._pairs.query_field, self._pairs.queries, False),
            (self._pairs.document_field, self._pairs.documents, self._cuts),
        ):
            for index, text in enumerate(texts):
                param = f"{name}[{index}]" if cut or len(texts) > 1 else name
                check_text(param, text, self._card, self._tokenizer, self._prompt_limit, cut=cut)

    async def classes(self) -> Prompts:
        """Each pair as its tokenizer joins it."""
        self._check_no_instruction()
        given = [(self._pairs.query_of(index), one) for index, one in enumerate(self._pairs.documents)]
        found = await self._tokenizer.encode_pairs(given)
        lengths, around = await self._lengths(), await self._around()
        prompts = []
        for index, (tokens, second) in enumerate(found):
            kept = self._shortened(tokens, lengths[index], around)
            self._check(index, kept, left=lengths[index] - (len(tokens) - len(kept)))
            prompts.append(Prompt(kept, second))
        return Prompts("classes", prompts)

    async def chats(self, way: Way, answers: Sequence[int] = ()) -> Prompts:
        """Each pair as a question to the model. `answers`: what it says to it, yes or no."""
        parts = await self._chat()
        end = parts.index(_DOCUMENT) + 1
        shown = await self._encoded(parts[:end], len(self._pairs.documents))
        tails = await self._encoded(parts[end:], len(shown) if len(parts) > end + 1 else 1)
        lengths = await self._lengths()
        prompts = []
        for index, body in enumerate(shown):
            tail = tails[index % len(tails)]
            count = max(0, self._count(len(body) + len(tail), lengths[index]) - len(tail))
            tokens = [*body[:count], *tail]
            self._check(index, tokens, left=lengths[index] - max(0, len(body) - count))
            prompts.append(Prompt(tokens))
        return Prompts(way, prompts, answers)

    async def vectors(self) -> Prompts:
        """The queries, then the documents, each behind the model's own prompt for it."""
        self._check_no_instruction()
        known = self._card.prompts
        kinds = (
            (self._pairs.query_field, self._pairs.queries, ("query",)),
            (self._pairs.document_field, self._pairs.documents, ("document", "passage")),
        )
        prompts: list[Prompt] = []
        for field, texts, names in kinds:
            name = next((name for name in names if name in known), self._card.default_prompt)
            prefix = known.get(name, "")
            found = await self._tokenizer.encode_all([prefix + text for text in texts])
            documents = texts is self._pairs.documents
            lengths = await self._lengths() if documents else [0] * len(texts)
            around = await self._around()
            for index, tokens in enumerate(found):
                kept = self._shortened(tokens, lengths[index], around)
                shown = f"{field}[{index}]" if documents or len(texts) > 1 else field
                check_length(shown, kept, self._card, self._prompt_limit)
                prompts.append(Prompt(kept))
        return Prompts("vectors", prompts)

    async def _chat(self) -> list[str]:
        """The chat of any pair: what the template writes, in turns with what stands for a client's text. Raises
        `InvalidParameter`."""
        traits, variables = self._tokenizer.traits, dict[str, Any](enable_thinking=False)
        if traits.pairs:
            asked = [{"role": "query", "content": _QUERY}, {"role": "document", "content": _DOCUMENT}]
            if self._instruction and "instruction" in traits.variables:
                variables["instruction"] = _INSTRUCTION
            elif self._instruction:
                asked.insert(0, {"role": "system", "content": _INSTRUCTION})
        else:
            instruction = _INSTRUCTION if self._instruction else INSTRUCT
            pair = f"<Instruct>: {instruction}\n<Query>: {_QUERY}\n<Document>: {_DOCUMENT}"
            asked = [{"role": "system", "content": JUDGE}, {"role": "user", "content": pair}]
            if not traits.system:
                asked = [{"role": "user", "content": f"{JUDGE}\n{pair}"}]
        rendered = await self._tokenizer.render_chat(asked, None, TemplateOptions(variables=variables))
        parts = _PLACES.split(rendered.text)
        if parts.count(_DOCUMENT) != 1 or _QUERY not in parts or len(parts) > _MOST_PARTS:
            raise _unfit(self._card, "has a chat template that does not show messages as they are")
        if self._instruction and _INSTRUCTION not in parts:
            raise self._no_instruction("the chat template of {} shows none")
        return parts

    async def _encoded(self, parts: Sequence[str], count: int) -> list[list[int]]:
        """A part of the chat for the first `count` pairs."""
        given = {_INSTRUCTION: self._instruction}
        filled = []
        for index, document in enumerate(self._pairs.documents[:count]):
            given |= {_QUERY: self._pairs.query_of(index), _DOCUMENT: document}
            filled.append([given.get(part, part) for part in parts])
        check_characters(self._pairs, sum(len(part) for one in filled for part in one))
        return await self._tokenizer.encode_parts(filled)

    def _check_no_instruction(self) -> None:
        if self._instruction:
            raise self._no_instruction("{} is not asked in words")

    def _no_instruction(self, why: str) -> InvalidParameter:
        shown = why.format(self._card.model)
        return InvalidField("instruction", f"{shown}; leave it out.", reason="unsupported_parameter")

    @property
    def _cuts(self) -> bool:
        return bool(self._cut_to or self._of_document)

    async def _lengths(self) -> list[int]:
        """Of each document in tokens, where that is of interest."""
        if not self._cuts:
            return [0] * len(self._pairs.documents)
        return list(map(len, await self._tokenizer.encode_all(self._pairs.documents, special=False)))

    async def _around(self) -> list[int]:
        """The special tokens around a text, which stay where it is cut."""
        return await self._tokenizer.encode("") if self._cuts else []

    def _count(self, whole: int, document: int) -> int:
        """Tokens that are left of a prompt of `whole`, `document` of them of the document at its end."""
        if self._of_document:
            whole -= max(0, document - self._of_document)
        if self._cut_to:
            whole = min(whole, self._cut_to if self._cut_to > 0 else self._most)
        return whole

    def _shortened(self, tokens: list[int], document: int, around: list[int]) -> list[int]:
        return cut_tokens(tokens, count=self._count(len(tokens), document), side="right", around=around)

    def _check(self, index: int, tokens: Sequence[int], *, left: int) -> None:
        """`left`: tokens of the document."""
        name = self._pairs.named(index)
        if self._cut_to and left < 1:
            raise InvalidField("truncate_prompt_tokens", f"{self._cut_to} leave no room for '{name}' behind its query.")
        check_length(name, tokens, self._card, self._prompt_limit, f"'{name}' with its query")


def _unfit(card: ModelCard, why: str) -> InvalidParameter:
    return InvalidField("model", f"{card.model} {why}.", reason="unsupported_task")

"""POST /v1/embeddings: each input is a generation without output, whose one entry has a vector.

    input [a, b] ─▶ two requests to embed ─▶ intake ─▶ rings ─▶ two entries with a vector ─▶ one response

So inputs are batched with all other work of a ring, wait while none is up, and are computed again where one is
lost. `dimensions` cuts a vector and brings it to length 1 again, as models are made for that are trained so
(Kusupati et al., "Matryoshka Representation Learning", arXiv:2205.13147); for others it only loses precision.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from services.gateway.core.errors import InvalidField, check_range, check_size
from services.gateway.intake.prompts.kv_cache import cache_salt, session_of
from services.gateway.intake.record import Context, RunDependencies
from services.gateway.intake.rules import OneOf, Ruled, Rules
from services.gateway.intake.sampling.params import check_token_ids
from services.gateway.intake.schemas import ChatCompletionRequest, LastTokens, Messages, ModelName, PositiveCount, User
from services.gateway.intake.validation import check_chat, check_fields, check_task, check_text, check_truncation
from services.gateway.lifecycle.request_state import new_identity
from services.gateway.tokenizer.tokenizer import Tokenizer
from shared import limits
from shared.errors import ContextLengthExceeded, PayloadTooLarge
from shared.messages import GenerationRequest, ModelCard
from shared.messages.records import GenerationRecord

_TOKEN_BYTES = 5  # of a token on the wire, at most


class EmbeddingRequest(Ruled, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/embeddings. `input`: a string, strings, token ids, or lists of token ids; or `messages` in its place."""

    model: ModelName
    input: str | list[str | int | list[int]] | None = None
    messages: Messages | None = None  # vLLM's: one conversation, as the model's chat template has it
    # Of `messages`: whether the template begins an answer; left out: it does not.
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # of `messages`: variables for the chat template
    # The last two are vLLM's: vectors one behind the other, in place of JSON.
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32"] | None = None  # vLLM's, of vectors that are no JSON numbers
    endianness: Literal["little", "native"] | None = None  # as `embed_dtype`
    dimensions: PositiveCount | None = None
    user: User | None = None
    truncate_prompt_tokens: LastTokens | None = None  # vLLM's, of each input
    # Of an input that is truncated: which end of it goes; left out: the left one, of an encoder the right one.
    truncation_side: Literal["left", "right"] | None = None
    # Which of the model's own prompts texts are put behind (`ModelCard.prompts`); left out: the default one.
    prompt_name: str | None = None

    rules: ClassVar[Rules] = (
        OneOf(
            ways=(("input",), ("messages",)),
            kinds={"messages": {"type": "array"}},
            lacks="Missing required parameter: 'input'; send texts or token ids, or a conversation as 'messages', not "
            "both.",
            param="input",
        ),
    )


def inputs_of(request: EmbeddingRequest) -> list[str | list[int]]:
    """The inputs, each a text or token ids; of a conversation none. Raises `InvalidParameter`."""
    check_fields(request)
    given = request.input
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidField("input", "it is an empty array; send at least one input.", reason="empty_array")
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    check_size("input", given, limits.EMBEDDING_INPUTS)
    if request.encoding_format == "bytes":
        check_size("input", given, limits.VECTORS_IN_HEADER)
    for kind in (str, list):
        if all(isinstance(item, kind) for item in given):
            return [item for item in given if not isinstance(item, int)]
    wrong = "it mixes strings, token ids and lists of them; send one kind."
    raise InvalidField("input", wrong, reason="invalid_type")


def chat_of(request: EmbeddingRequest) -> ChatCompletionRequest:
    """The conversation whose tokens are the input. Raises `InvalidParameter`."""
    chat = ChatCompletionRequest(
        model=request.model,
        messages=request.messages or [],
        add_generation_prompt=bool(request.add_generation_prompt),
        chat_template_kwargs=request.chat_template_kwargs,
    )
    check_chat(chat)
    return chat


def check(request: EmbeddingRequest, card: ModelCard) -> None:
    """Raises `InvalidParameter` for the first thing wrong in `request`, but for its inputs."""
    check_task(card, "embed")
    if request.dimensions is not None:
        check_range("dimensions", request.dimensions, 1, card.embedding_size)
        _check_matryoshka(request.dimensions, card)
    if request.truncate_prompt_tokens is not None:
        check_range("truncate_prompt_tokens", request.truncate_prompt_tokens, -1, card.context_length)
        check_truncation(request.truncate_prompt_tokens)


def _check_matryoshka(dimensions: int, card: ModelCard) -> None:
    lengths = card.matryoshka_dimensions
    if lengths is None or dimensions in (*lengths, card.embedding_size):
        return
    rest = "and for no others; leave it out" if not lengths else f"or {', '.join(map(str, lengths))}"
    wrong = f"{card.model} was trained for vectors of {card.embedding_size} numbers {rest}."
    raise InvalidField("dimensions", wrong, reason="unsupported_value")


async def prompts_of(
    request: EmbeddingRequest,
    given: Sequence[str | list[int]],
    tokenizer: Tokenizer,
    card: ModelCard,
    prompt_limit: int = 0,
) -> list[list[int]]:
    """The tokens of each input, `prompt_limit` at most (0: what the context has).

    Raises `InvalidParameter`, `ContextLengthExceeded`, both with the input's index."""
    several = not isinstance(request.input, str)
    prefix = _prompt(request, card)
    texts = [prefix + one for one in given if isinstance(one, str)]
    most = min(card.context_length, prompt_limit or card.context_length)
    truncated = bool(request.truncate_prompt_tokens)
    for index, text in enumerate(texts):
        name = f"input[{index}]" if several else "input"
        check_text(name, text, card, tokenizer, prompt_limit, cut=truncated)
    encoded = iter(await tokenizer.encode_all(texts) if texts else ())
    cut = await _cutting(request, tokenizer, card, most)
    prompts = []
    for index, one in enumerate(given):
        name = f"input[{index}]" if several else "input"
        if request.messages is not None:
            name = "messages"
        if isinstance(one, str):
            tokens = next(encoded)
        else:
            check_token_ids(name, one, card.vocab_size)
            tokens = one
        tokens = cut(tokens)
        if not tokens:
            raise InvalidField(name, "it resulted in no token; send at least one character.", reason="empty_prompt")
        check_length(name, tokens, card, prompt_limit)
        prompts.append(tokens)
    return prompts


def check_length(name: str, tokens: Sequence[int], card: ModelCard, prompt_limit: int, what: str = "") -> None:
    """Raises `ContextLengthExceeded` where the `tokens` of the field `name` are too many. `what`: what has them, if
    more than that."""
    shown = what or f"'{name}'"
    if prompt_limit and len(tokens) > prompt_limit:
        raise ContextLengthExceeded(
            f"This server takes prompts of at most {prompt_limit} tokens, and {shown} has {len(tokens)}; "
            f"shorten it ({limits.PROMPT_TOKENS.cited(prompt_limit)}).",
            param=name,
        )
    if len(tokens) > card.context_length:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.context_length} tokens, and {shown} has "
            f"{len(tokens)}; shorten it.",
            param=name,
        )


def _check_together(prompts: Sequence[Sequence[int]], most: int) -> None:
    """Raises `PayloadTooLarge` where `prompts` are too much for the queue, whose limit is `most` bytes."""
    tokens = sum(map(len, prompts))
    if tokens * _TOKEN_BYTES > most:
        raise PayloadTooLarge(
            f"The request's {len(prompts)} prompts have {tokens:,} tokens together, pairs each with their query; "
            f"send fewer texts at a time ({limits.GENERATION_BYTES.cited(most)}).",
            param=None,
        )


def _prompt(request: EmbeddingRequest, card: ModelCard) -> str:
    """What texts are put behind. Raises `InvalidParameter`."""
    name = card.default_prompt if request.prompt_name is None else request.prompt_name
    if not name and request.prompt_name is None:
        return ""
    if name not in card.prompts:
        known = f"it has {', '.join(card.prompts)}" if card.prompts else "it has none"
        raise InvalidField("prompt_name", f"{card.model} has no prompt of that name, {known}; leave it out.")
    return card.prompts[name]


async def _cutting(
    request: EmbeddingRequest, tokenizer: Tokenizer, card: ModelCard, most: int
) -> Callable[[list[int]], list[int]]:
    """What makes of an input's tokens those that are read; `most`: of the longest input."""
    count = request.truncate_prompt_tokens
    if not count:
        return lambda tokens: tokens
    around = await tokenizer.encode("") if card.bidirectional else []
    side = request.truncation_side or ("right" if card.bidirectional else "left")
    return partial(cut_tokens, count=count if count > 0 else most, side=side, around=around)


def cut_tokens(tokens: list[int], *, count: int, side: str, around: list[int]) -> list[int]:
    """`count` tokens at most, without the rest at `side`. `around`: the special tokens of an encoder's empty text,
    which stay where they are."""
    if len(tokens) <= count:
        return tokens
    alike = zip(around, tokens, strict=False)
    before = next((at for at, (special, token) in enumerate(alike) if special != token), len(around))
    behind = around[before:]
    whole = bool(around) and count > len(around) and tokens[len(tokens) - len(behind) :] == behind
    if not whole:
        return tokens[:count] if side == "right" else tokens[-count:]
    inner = tokens[before : len(tokens) - len(behind)]
    left = count - len(around)
    return [*tokens[:before], *(inner[:left] if side == "right" else inner[-left:]), *behind]


def record_of(
    prompts: Sequence[list[int]],
    request: EmbeddingRequest,
    card: ModelCard,
    context: Context,
    parts: RunDependencies,
    endpoint: str = "embeddings",
) -> GenerationRecord:
    """The record of a checked request. Raises `PayloadTooLarge`."""
    wanted = [{"prompt": prompt, "embed": True} for prompt in prompts]
    shown = {"dimensions": request.dimensions or 0, "user": request.user or "", **encoding_of(request)}
    return pooled_record(endpoint, wanted, card, context, parts, **shown)


def pooled_record(
    endpoint: str,
    wanted: Sequence[Mapping[str, Any]],
    card: ModelCard,
    context: Context,
    parts: RunDependencies,
    **shown: Any,
) -> GenerationRecord:
    """The record of generations without output, whose one entry has a vector. `wanted`: fields of each one's request,
    its prompt among them, beside what all have; `shown`: of the record. Raises `PayloadTooLarge`."""
    started_at, settings = time.time(), parts.settings
    _check_together([fields["prompt"] for fields in wanted], settings.generation_bytes)
    identity = new_identity(parts.answers.writer, started_at)
    wires = [
        GenerationRequest(
            generation_id=f"{identity}-{index}",
            request_id=context.request_id,
            model=card.model,
            consumer=parts.answers.consumer,
            max_tokens=1,
            session=session_of(context.tenant, context.session, context.model.adapter),
            lane=context.lane,
            tenant=context.tenant,
            deadline=started_at + settings.token_timeout,
            cache_salt=cache_salt(None, context.tenant if settings.isolate_tenant_cache else ""),
            adapter=context.model.adapter,
            **fields,
        )
        for index, fields in enumerate(wanted)
    ]
    return GenerationRecord(
        identity=identity,
        endpoint=endpoint,
        created=started_at,
        requests=wires,
        prompts=len(wires),
        background=context.background,
        idempotency=context.idempotency,
        tenant=context.tenant,
        adapter=context.model.name,
        **shown,
    )


def encoding_of(request: EmbeddingRequest) -> dict[str, Any]:
    """The fields of the record that say in which form vectors are shown."""
    form = request.encoding_format or "float"
    return {"base64": form != "float", "octets": form if form.startswith("bytes") else ""}

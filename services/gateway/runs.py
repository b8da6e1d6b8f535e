"""From an answer to a `Run` that reads it: from its beginning, or from where a client stands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.gateway.answer import Answer
from services.gateway.formats import ChatFormat, CompletionFormat, Format
from services.gateway.metrics import ModelMetrics
from services.gateway.run import Run
from services.gateway.shown import Shown
from services.gateway.text_output import TextOutput
from services.gateway.tokenization import Tokenizer
from services.gateway.vectors import VectorFormat, VectorOutput
from shared.messages import GenerationRequest
from shared.records import GenerationRecord

if TYPE_CHECKING:
    from services.gateway.answers import Answers


def new_run(
    answer: Answer,
    tokenizer: Tokenizer,
    answers: "Answers",
    *,
    metrics: ModelMetrics | None = None,
    after: Sequence[int] | None = None,
) -> Run:
    """`metrics`: where its tokens are counted, None for what was counted before. `after`: the client's
    positions; None: it has seen nothing."""
    record = answer.record
    if record.endpoint == "embeddings":
        vectors = VectorFormat(record.requests[0].model, as_base64=record.base64)
        inputs = [VectorOutput(record.dimensions) for _ in answer.generations]
        return Run(answer, inputs, vectors, answers, metrics, after=after)
    shape: Format = (ChatFormat if record.endpoint == "chat.completions" else CompletionFormat)(
        record.identity,
        record.requests[0].model,
        int(record.created),
        tokenizer,
        include_usage=record.include_usage,
        fingerprint=record.fingerprint,
        service_tier=record.service_tier,
    )
    if record.best or record.echo:
        shape = _shown(shape, record, tokenizer)
    outputs = [_output(answer, generation.request, tokenizer) for generation in answer.generations]
    return Run(answer, outputs, shape, answers, metrics, after=after)


def _output(answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> TextOutput:
    record = answer.record
    chat = record.endpoint == "chat.completions"
    detokenizer = tokenizer.detokenizer(
        [] if chat and not record.continues else request.prompt,  # a chat's answer begins a text
        skip_special_tokens=record.skip_special_tokens,
    )
    logprobs = request.sampling.logprobs >= 0
    return TextOutput(
        detokenizer,
        record.stop,
        request.stop_token_ids,
        logprobs=logprobs,
        include_stop=record.include_stop,
        min_tokens=request.sampling.min_tokens,
    )


def _shown(shape: Format, record: GenerationRecord, tokenizer: Tokenizer) -> Shown:
    prompts = [request.prompt for request in record.requests]

    def text(prompt: int) -> str:
        return tokenizer.decode(prompts[prompt], skip_special_tokens=True)

    return Shown(shape, record.choices, record.best, record.hide_logprobs, text if record.echo else None)

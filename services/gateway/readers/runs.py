"""From an answer to a `Run` that reads it: from its beginning, or from where a client stands."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from services.gateway.life.answer import Answer
from services.gateway.metrics import ModelMetrics
from services.gateway.readers.run import Owner, Run
from services.gateway.responses.run import ResponseRun
from services.gateway.text.formats import ChatFormat, CompletionFormat, Format, PromptIds
from services.gateway.text.prompt_scores import EchoedPrompt, PromptList
from services.gateway.text.shown import Shown
from services.gateway.text.text_output import Output, TextOutput
from services.gateway.text.tokenization import Tokenizer
from services.gateway.text.vectors import VectorFormat, VectorOutput
from services.gateway.tools.families import markers_of
from services.gateway.tools.output import ParsedOutput
from shared.messages import GenerationRequest
from shared.messages.records import GenerationRecord


class View(Protocol):
    """How a reader sees answers that are not shown in the format of the endpoint that began them."""

    def shape(self, answer: Answer, tokenizer: Tokenizer) -> Format: ...

    def output(self, answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output: ...


def new_run(
    answer: Answer,
    tokenizer: Tokenizer,
    answers: Owner,
    *,
    metrics: ModelMetrics | None = None,
    after: Sequence[int] | None = None,
    view: View | None = None,
) -> Run:
    """`metrics`: where its tokens are counted, None for what was counted before. `after`: the client's
    positions; None: it has seen nothing. `view`: None for the format of its endpoint."""
    if view is not None:
        seen = [view.output(answer, generation.request, tokenizer) for generation in answer.generations]
        seen_as = view.shape(answer, tokenizer)
        return Run(answer, seen, seen_as, answers, metrics, after=after, as_recorded=False)
    record = answer.record
    if record.endpoint == "embeddings":
        vectors = VectorFormat(record.requests[0].model, as_base64=record.base64)
        inputs = [VectorOutput(record.dimensions) for _ in answer.generations]
        return Run(answer, inputs, vectors, answers, metrics, after=after)
    if record.endpoint == "responses":
        output = output_of(answer, record.requests[0], tokenizer)
        return ResponseRun(answer, output, tokenizer, answers, metrics, after=after)
    shape = _shape(answer, tokenizer)
    outputs = [output_of(answer, generation.request, tokenizer) for generation in answer.generations]
    return Run(answer, outputs, shape, answers, metrics, after=after)


def output_of(answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output:
    """The text of one choice as its record wants it, with what is not text taken out of it."""
    record = answer.record
    chat = record.endpoint != "completions"
    detokenizer = tokenizer.detokenizer(
        [] if chat and not record.continues else request.prompt,  # a chat's answer begins a text
        skip_special_tokens=record.skip_special_tokens,
        keep=markers_of(record.parsing),
    )
    logprobs = request.sampling.logprobs >= 0
    output = TextOutput(
        detokenizer,
        record.stop,
        request.stop_token_ids,
        logprobs=logprobs,
        include_stop=record.include_stop,
        min_tokens=request.sampling.min_tokens,
        prompt_scores=request.prompt_logprobs >= 0,
        score_end=record.echo and request.prompt_logprobs >= 0,
        token_ids=record.token_ids,
        told_stop_ids=record.stop_token_ids,
    )
    if record.parsing is None:
        return output
    return ParsedOutput(output, record.parsing, request.generation_id)


def _shape(answer: Answer, tokenizer: Tokenizer) -> Format:
    """How a chat completion's answer, or a completion's, is shown."""
    record = answer.record
    logprobs = record.requests[0].sampling.logprobs >= 0 and not record.hide_logprobs
    prompts = prompt_list(answer, tokenizer)
    ids = PromptIds([item.request for item in answer.generations]) if record.token_ids else None
    identity, model, created = record.identity, record.requests[0].model, int(record.created)
    usage, tier = record.include_usage, record.service_tier
    if record.endpoint == "chat.completions":
        return ChatFormat(
            identity,
            model,
            created,
            tokenizer,
            include_usage=usage,
            parsing=record.parsing,
            fingerprint_of=answer.fingerprint_of,
            service_tier=tier,
            logprobs=logprobs,
            prompts=prompts,
            tokens_as_ids=record.tokens_as_ids,
            ids=ids,
        )
    shape = CompletionFormat(
        identity,
        model,
        created,
        tokenizer,
        include_usage=usage,
        fingerprint_of=answer.fingerprint_of,
        service_tier=tier,
        logprobs=logprobs,
        prompts=prompts,
        tokens_as_ids=record.tokens_as_ids,
        ids=ids,
    )
    return shown_as_asked(shape, record, tokenizer)


def prompt_list(answer: Answer, tokenizer: Tokenizer) -> PromptList | None:
    """Log probabilities of the prompts, where they are shown in a list."""
    top = answer.record.prompt_logprobs
    return PromptList([item.request for item in answer.generations], top, tokenizer) if top >= 0 else None


def shown_as_asked(shape: Format, record: GenerationRecord, tokenizer: Tokenizer) -> Format:
    """`shape` with the prompts and the best candidates, where the request asked for them."""
    if not record.best and not record.echo:
        return shape

    @cache
    def prompt(number: int) -> EchoedPrompt:
        return EchoedPrompt(record.requests[number], tokenizer)

    return Shown(shape, record.choices, record.best, record.hide_logprobs, prompt if record.echo else None)

"""From an answer to a `Run` that reads it: from its beginning, or from where a client stands."""

from collections.abc import Sequence
from typing import Protocol

from services.gateway.answer import Answer
from services.gateway.formats import ChatFormat, CompletionFormat, Format
from services.gateway.metrics import ModelMetrics
from services.gateway.responses.run import ResponseRun
from services.gateway.run import Owner, Run
from services.gateway.text_output import Output, TextOutput
from services.gateway.tokenization import Tokenizer
from services.gateway.tools.families import markers_of
from services.gateway.tools.output import ParsedOutput
from shared.messages import GenerationRequest


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
        return Run(answer, seen, view.shape(answer, tokenizer), answers, metrics, after=after)
    record = answer.record
    if record.endpoint == "responses":
        output = output_of(answer, record.requests[0], tokenizer)
        return ResponseRun(answer, output, tokenizer, answers, metrics, after=after)
    model, created, usage = record.requests[0].model, int(record.created), record.include_usage
    shape: Format
    if record.endpoint == "chat.completions":
        shape = ChatFormat(
            record.identity, model, created, tokenizer, include_usage=usage, parsing=record.parsing
        )
    else:
        shape = CompletionFormat(record.identity, model, created, tokenizer, include_usage=usage)
    outputs = [output_of(answer, generation.request, tokenizer) for generation in answer.generations]
    return Run(answer, outputs, shape, answers, metrics, after=after)


def output_of(answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output:
    """The text of one choice as its record wants it, with what is not text taken out of it."""
    record = answer.record
    chat = record.endpoint != "completions"
    detokenizer = tokenizer.detokenizer(
        [] if chat else request.prompt,  # a chat's answer begins a text, a completion goes on
        skip_special_tokens=record.skip_special_tokens,
        keep=markers_of(record.parsing),
    )
    logprobs = request.sampling.logprobs >= 0
    output = TextOutput(detokenizer, record.stop, request.stop_token_ids, logprobs=logprobs)
    if record.parsing is None:
        return output
    return ParsedOutput(output, record.parsing, request.generation_id)

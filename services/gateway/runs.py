"""From an answer to a `Run` that reads it: from its beginning, or from where a client stands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from services.gateway.answer import Answer
from services.gateway.formats import ChatFormat, CompletionFormat, Format
from services.gateway.metrics import ModelMetrics
from services.gateway.run import Output, Run
from services.gateway.text_output import TextOutput
from services.gateway.tokenization import Tokenizer
from shared.messages import GenerationRequest

if TYPE_CHECKING:
    from services.gateway.answers import Answers


class View(Protocol):
    """How a reader sees answers that are not shown in the format of the endpoint that began them."""

    def shape(self, answer: Answer, tokenizer: Tokenizer) -> Format: ...

    def output(self, answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> Output: ...


def new_run(
    answer: Answer,
    tokenizer: Tokenizer,
    answers: "Answers",
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
    shape = (ChatFormat if record.endpoint == "chat.completions" else CompletionFormat)(
        record.identity,
        record.requests[0].model,
        int(record.created),
        tokenizer,
        include_usage=record.include_usage,
    )
    outputs = [text_output(answer, generation.request, tokenizer) for generation in answer.generations]
    return Run(answer, outputs, shape, answers, metrics, after=after)


def text_output(answer: Answer, request: GenerationRequest, tokenizer: Tokenizer) -> TextOutput:
    """The text of one choice, as its record wants it."""
    record = answer.record
    chat = record.endpoint == "chat.completions"
    detokenizer = tokenizer.detokenizer(
        [] if chat else request.prompt,  # a chat's answer begins a text, a completion goes on
        skip_special_tokens=record.skip_special_tokens,
    )
    logprobs = request.sampling.logprobs >= 0
    return TextOutput(detokenizer, record.stop, request.stop_token_ids, logprobs=logprobs)

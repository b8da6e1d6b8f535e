"""What a reading tells Prometheus of its answer when it ends."""

from collections.abc import Sequence

from services.gateway.life.answer import Answer
from services.gateway.metrics import ModelMetrics
from services.gateway.text.formats import Usage
from services.gateway.text.text_output import Output

Reason = str


def count_end(metrics: ModelMetrics, answer: Answer, outputs: Sequence[Output], seconds: float) -> None:
    """Each choice by the reason of its end; and, where all have come to theirs, how long that took."""
    for generation, output in zip(answer.generations, outputs, strict=True):
        metrics.ended(_reason(output.finish, failed=generation.state == "failed"))
    if all(output.finish for output in outputs):
        metrics.generation.observe(seconds)


def count_tokens(metrics: ModelMetrics, usage: Usage) -> None:
    metrics.prompt_tokens.inc(usage.prompt_tokens)
    metrics.output_tokens.inc(usage.completion_tokens)
    metrics.cached_tokens.inc(usage.prompt_tokens_details["cached_tokens"])


def _reason(finish: str, *, failed: bool) -> Reason:
    """As vLLM has them. A call of a tool is an end that the model has chosen."""
    if finish:
        return "length" if finish == "length" else "stop"
    return "error" if failed else "abort"

"""Whether the answer to a chat must match a grammar, and which: from its tools and its format together. Pure."""

from collections.abc import Iterator, Mapping

from services.gateway.errors import InvalidParameter
from services.gateway.requests.structured import Wanted, grammar_of_schema
from services.gateway.tools.forms import NO_PARAMETERS
from services.gateway.tools.grammar import (
    Calling,
    behind_reasoning,
    calls_or,
    required_calls,
    strict_calls,
)
from services.gateway.tools.plan import ChatPlan
from shared import limits
from shared.messages import Grammar
from shared.messages.records import Parsing


def demanded(
    plan: ChatPlan, parsing: Parsing | None, answer: Wanted | None, specials: Mapping[str, int]
) -> Wanted | None:
    """What is to be checked and sent to the ring; None: any text. `answer`: what the client says of the format.
    `specials`: ids of the special tokens among the markers. Raises `InvalidParameter`."""
    if parsing is None:
        return answer
    reasoning, opened = parsing.reasoning, parsing.opened
    if not plan.family:
        if answer is None or not opened:
            return answer
        return _as(answer, behind_reasoning(answer.grammar, reasoning, specials))
    calling = Calling(plan.family, plan.variant, plan.asked.functions, plan.single, specials)
    if plan.asked.required:
        grammar = required_calls(calling, reasoning, opened=opened)
    elif answer is not None:
        return _as(answer, calls_or(calling, answer.grammar, reasoning, opened=opened))
    elif (strict := strict_calls(calling, reasoning, opened=opened)) is not None:
        grammar = strict
    else:
        return None
    name = "functions" if plan.asked.legacy else "tools"
    return _small_enough(Wanted(grammar, name, f"Invalid '{name}'"))


def schemas_of(plan: ChatPlan) -> Iterator[Wanted]:
    """The schema of each function alone: which of them does not compile."""
    path = "functions[{}].parameters" if plan.asked.legacy else "tools[{}].function.parameters"
    for index, function in enumerate(plan.asked.shown):
        schema = {"type": "object", **(function.parameters or NO_PARAMETERS)}
        yield Wanted(
            grammar_of_schema(schema), path.format(index), f"Invalid schema for function '{function.name}'"
        )


def _as(wanted: Wanted, grammar: Grammar) -> Wanted:
    return _small_enough(Wanted(grammar, wanted.param, wanted.subject))


def _small_enough(wanted: Wanted) -> Wanted:
    size = len(wanted.grammar.text.encode())
    if size > limits.GRAMMAR_BYTES.value:
        raise InvalidParameter(
            f"{wanted.subject}: as a grammar it has {size} bytes; send fewer or smaller schemas "
            f"({limits.GRAMMAR_BYTES.cited()}).",
            param=wanted.param,
            reason="string_above_max_length",
        )
    return wanted

"""From a line to what a model learns: conversations in the form in which its chat template gets them when it serves.
Pure.
"""

from collections.abc import Sequence

import msgspec

from services.gateway.core.errors import InvalidField, InvalidParameter, renamed, unsupported
from services.gateway.intake import validation
from services.gateway.intake.fine_tuning.schemas import ConversationLine, PreferenceLine, TextLine, line_of
from services.gateway.intake.prompts.chat import plan_of
from services.gateway.intake.schemas import ChatCompletionRequest, TrainedMessage
from services.gateway.tokenizer.templates import TemplateInput, Traits
from services.gateway.tokenizer.turns import TextSegment, TrainedText
from shared.messages import ModelCard
from shared.messages.training import TrainingMethod

_replace = msgspec.structs.replace


# One that was checked; the messages of a conversation are `TrainedMessage`s.
Text = ChatCompletionRequest | TextLine


def texts_of(data: bytes, method: TrainingMethod) -> list[Text]:
    """What a line holds, checked as far as that needs no model: one text, of `dpo` the preferred one and the other.
    Raises `InvalidParameter`."""
    line = line_of(data, method)
    if isinstance(line, TextLine):
        return [line]
    if isinstance(line, PreferenceLine):
        return _pair(line)
    _check_weights(line.messages)
    return [_request(line, line.messages)]


def _pair(line: PreferenceLine) -> list[Text]:
    outputs = (("preferred_output", line.preferred_output), ("non_preferred_output", line.non_preferred_output))
    for name, output in outputs:
        if len(output) != 1 or output[0].role != "assistant":
            raise InvalidField(name, "expected one message with role 'assistant', the answer to 'input'.")
    if line.preferred_output == line.non_preferred_output:
        raise InvalidField(
            "non_preferred_output", "it is the same as 'preferred_output', so there is nothing to prefer."
        )
    for index, message in enumerate([*line.input.messages, *(output[0] for _, output in outputs)]):
        if message.weight is not None:
            raise unsupported(f"input.messages[{index}].weight", "a preference pair has none; leave it out")
    context = [_replace(message, weight=0) for message in line.input.messages]
    return [_ending_with(line.input, context, name, output[0]) for name, output in outputs]


def _ending_with(line: ConversationLine, context: list[TrainedMessage], name: str, output: TrainedMessage) -> Text:
    names = {f"messages[{len(context)}]": f"{name}[0]"}
    names |= {field: f"input.{field}" for field in ("messages", "tools", "functions")}
    with renamed(names, "input"):
        return _request(line, [*context, output])


def _check_weights(messages: list[TrainedMessage]) -> None:
    for index, message in enumerate(messages):
        if message.weight is not None and message.role != "assistant":
            raise unsupported(f"messages[{index}].weight", "only messages with role 'assistant' have one; leave it out")
    if not any(message.role == "assistant" for message in messages):
        raise InvalidParameter(
            "The conversation has no message with role 'assistant', so there is nothing to learn; end it with one.",
            param="messages",
            reason="no_assistant_message",
        )
    if not any(_is_trained(message) for message in messages):
        raise InvalidParameter(
            "Every assistant's message has the weight 0, so there is nothing to learn; leave 'weight' out of one.",
            param="messages",
            reason="no_trained_message",
        )
    if _is_trained(messages[0]):
        raise InvalidParameter(
            "The first message is the assistant's, and it answers nothing: begin with a message of another role, or "
            "give it the weight 0.",
            param="messages[0]",
        )


def _is_trained(message: TrainedMessage) -> bool:
    return message.role == "assistant" and message.weight != 0


def _request(line: ConversationLine, messages: list[TrainedMessage]) -> ChatCompletionRequest:
    """As a client of chat completions would send the conversation. Raises `InvalidParameter`."""
    validation.check_messages(messages)
    validation.check_conversation(messages, may_end_with_calls=True)
    for index, message in enumerate(messages):
        if isinstance(message.content, list) and any(part.type == "file" for part in message.content):
            raise unsupported(f"messages[{index}].content", "no files are read here; send their text")
    return ChatCompletionRequest(
        model="",
        messages=[
            _replace(message, content=message.text, refusal=None) if message.refusal else message
            for message in messages
        ],
        tools=line.tools,
        parallel_tool_calls=line.parallel_tool_calls,
        functions=line.functions,
        reasoning_effort=line.reasoning_effort,
        chat_template_kwargs=line.chat_template_kwargs,
    )


# --- for one model -------------------------------------------------------------------------------


def conversation_of(request: ChatCompletionRequest, card: ModelCard, traits: Traits) -> tuple[TemplateInput, list[int]]:
    """The conversation for the model's chat template, and the indices of the messages that are trained. Raises
    `InvalidParameter`."""
    plan = plan_of(request, card, traits)
    if plan.ignored:
        raise unsupported(plan.ignored[0], "the model's chat template does not use it; leave it out")
    trained = [
        index
        for index, message in enumerate(plan.messages)
        if message["role"] == "assistant" and message.get("weight") != 0
    ]
    shown = [{name: value for name, value in message.items() if name != "weight"} for message in plan.messages]
    return TemplateInput(shown, plan.tools, plan.options), trained


def text_of_line(line: TextLine) -> TrainedText:
    """A plain text: its completion is trained."""
    text = line.prompt + line.completion
    return TrainedText([TextSegment(text, [(len(line.prompt), len(text))])], special=True)


def check_pair(texts: Sequence[TrainedText]) -> None:
    """Raises `InvalidParameter` where a pair's outputs are not one text each."""
    if len(texts) != 2:
        raise InvalidParameter(
            "The chat template of the model shows the calls of an output one by one, and each in another way when "
            "others follow, so the output is no single text: send outputs with one call.",
            param="preferred_output",
            reason="invalid_messages",
        )


def check_context(tokens: int, most: int, *, set_by_job: bool) -> None:
    """Raises `InvalidParameter` where a text has more than `most` tokens."""
    if tokens > most:
        bound = f"the job's max_tokens of {most:,}" if set_by_job else f"the model's context of {most:,} tokens"
        raise InvalidParameter(
            f"The example has {tokens:,} tokens, more than {bound}; shorten it, or create the job with 'truncate' to "
            "have it cut at its end.",
            param="messages",
            reason="example_too_long",
        )


def check_trained(weights: bytes, *, cut: bool) -> None:
    """Raises `InvalidParameter` where nothing is trained."""
    if not any(weights):
        raise InvalidParameter(
            "Nothing that is trained is left of the example where it was cut, so there is nothing to learn; shorten "
            "what stands before the answer."
            if cut
            else "Nothing of it is trained: the model's chat template shows nothing of the answer.",
            param="messages",
            reason="no_trained_tokens",
        )

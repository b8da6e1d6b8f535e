"""Reads one file of a fine-tuning job, line by line, and makes tokens of it: a few lines at a time, so that clients'
requests for the same template and tokenizer come in between.

    lines ──check, in a thread──▶ conversations ──template process──▶ texts ──tokenizer threads──▶ tokens ──▶ `Dataset`
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from services.gateway.core.errors import InvalidParameter
from services.gateway.files.files import Files
from services.gateway.files.lines import FileLine, input_lines
from services.gateway.intake.fine_tuning.dataset import Dataset
from services.gateway.intake.fine_tuning.examples import check_pair, conversation_of, text_of_line, texts_of
from services.gateway.intake.fine_tuning.faults import Faults
from services.gateway.intake.fine_tuning.schemas import TextLine
from services.gateway.tokenizer.templates import TemplateInput
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tokenizer.turns import TrainedText
from services.gateway.training.settings import FineTuningSettings
from shared.errors import InternalError, QueueFull
from shared.limits import TRAINING_EXAMPLES, TRAINING_TOKENS
from shared.messages import ModelCard
from shared.messages.training import TrainingMethod
from shared.nats.objects import MissingObject

# Lines that are tokenized at once, at most: a line more than these bytes is alone.
GROUP_LINES, GROUP_BYTES = 32, 32 << 10
# Seconds until another try where clients' requests fill the queues of templates and tokenizers.
BUSY_PAUSE = 0.5

ResultT = TypeVar("ResultT")


class BaseModelTokenizer(NamedTuple):
    """The model that learns."""

    card: ModelCard
    tokenizer: Tokenizer


# A text before its rendering: a plain one, or a conversation with the indices of its trained messages.
Learned = TextLine | tuple[TemplateInput, list[int]]


class TokenizedFile(NamedTuple):
    data: Dataset
    faults: Faults


class TrainingFileReader:
    """For one file."""

    def __init__(
        self,
        files: Files,
        body_limit: int,
        settings: FineTuningSettings,
        base: BaseModelTokenizer,
        method: TrainingMethod,
        into: TokenizedFile,
        tokens_before: int = 0,
    ) -> None:
        """`tokens_before`: of the job's other file."""
        self._files = files
        self._body_limit, self._settings = body_limit, settings
        self._base = base
        self._method: TrainingMethod = method
        self._data, self._faults = into
        self._tokens_before = tokens_before

    async def read(self, object_name: str) -> None:
        """Raises `MissingObject`, also where it is not what was written, and `BrokerUnavailable`, `InternalError`."""
        async with contextlib.aclosing(self._groups(object_name)) as groups:
            async for group in groups:
                await self._add(group)
                if self._faults.full or self._above_limits(group[-1].number):
                    break
        self._faults.check_count(self._data.lines)

    async def _groups(self, object_name: str) -> AsyncGenerator[list[FileLine], None]:
        group: list[FileLine] = []
        size = 0
        try:
            async with contextlib.aclosing(input_lines(self._files, object_name, self._body_limit)) as lines:
                async for line in lines:
                    if group and (len(group) == GROUP_LINES or size + len(line.data) > GROUP_BYTES):
                        yield group
                        group, size = [], 0
                    group.append(line)
                    size += len(line.data)
        except InternalError as error:
            raise MissingObject(object_name) from error
        if group:
            yield group

    async def _add(self, group: Sequence[FileLine]) -> None:
        """What the lines hold, and what is wrong with them, in their order."""
        checked = await asyncio.to_thread(lambda: [self._checked(line) for line in group])
        texts = [await self._rendered(one) for one in checked]
        found = iter(
            await _patiently(
                lambda: self._base.tokenizer.encode_trained(
                    [text for one in texts if isinstance(one, list) for text in one], self._end
                )
            )
        )
        for line, one in zip(group, texts, strict=True):
            if self._faults.full:
                return
            if one is None:
                self._faults.check_line(line.number, line.fault, self._body_limit)
            elif isinstance(one, InvalidParameter):
                self._faults.add(line.number, one)
            else:
                tokens = [next(found) for _ in one]
                unlike = next((text.unlike_prompt for text in one if text.unlike_prompt), "")
                try:
                    self._data.add(line.data, tokens, unlike)
                except InvalidParameter as error:
                    self._faults.add(line.number, error)

    @property
    def _end(self) -> int | None:
        return next(iter(self._base.card.eos_token_ids), None)

    def _checked(self, line: FileLine) -> list[Learned] | InvalidParameter | None:
        """None: the line could not be read."""
        if line.fault:
            return None
        card, tokenizer = self._base
        try:
            return [
                text if isinstance(text, TextLine) else conversation_of(text, card, tokenizer.traits)
                for text in texts_of(line.data, self._method)
            ]
        except InvalidParameter as error:
            return error

    async def _rendered(
        self, checked: list[Learned] | InvalidParameter | None
    ) -> list[TrainedText] | InvalidParameter | None:
        if not isinstance(checked, list):
            return checked
        found: list[TrainedText] = []
        try:
            for text in checked:
                if isinstance(text, TextLine):
                    found.append(text_of_line(text))
                else:
                    found += await self._turns(*text)
            if self._method == "dpo":
                check_pair(found)
        except InvalidParameter as error:
            return error
        return found

    async def _turns(self, conversation: TemplateInput, trained: list[int]) -> list[TrainedText]:
        return await _patiently(lambda: self._base.tokenizer.render_turns(conversation, trained))

    def _above_limits(self, line: int) -> bool:
        for limit, most, count in (
            (TRAINING_EXAMPLES, self._settings.training_examples, self._data.examples),
            (TRAINING_TOKENS, self._settings.training_tokens, self._tokens_before + self._data.tokens),
        ):
            if count > most:
                what = "examples" if limit is TRAINING_EXAMPLES else "tokens"
                self._faults.add_of_file(
                    "file_too_large",
                    f"Up to here there are {count:,} {what}; make the file smaller ({limit.cited(most)}).",
                    line,
                )
                return True
        return False


async def _patiently(work: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """`work`, again where others fill its queue: they go first."""
    while True:
        try:
            return await work()
        except QueueFull:
            await asyncio.sleep(BUSY_PAUSE)

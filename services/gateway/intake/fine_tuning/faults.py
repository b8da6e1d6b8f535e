"""What is wrong with the lines of a file: the first hundred faults are kept and told. Pure."""

from services.gateway.core.errors import InvalidParameter
from shared import limits
from shared.messages.batches import BatchError
from shared.messages.training import MAX_EVENT_MESSAGE, TrainingError

MAX_FAULTS = 100
LEAST_EXAMPLES = 2  # of a training file: of one example there is nothing to learn but itself
CODE = "invalid_training_file"
_IN_MESSAGE = 3  # faults that the job's own error tells; its events tell all that are kept
_CHARACTERS = 400  # of a fault


class Faults:
    """Of one file."""

    def __init__(self, param: str) -> None:
        """`param`: the field of the job that names the file."""
        self.param = param
        self._file = param.replace("_", " ")
        self.found: list[BatchError] = []

    @property
    def full(self) -> bool:
        """Whether it is of no use to go on."""
        return len(self.found) >= MAX_FAULTS

    def add(self, line: int, error: InvalidParameter) -> None:
        """Of one line, from 1."""
        self.found.append(BatchError(error.reason, error.message[:_CHARACTERS], line, error.param))

    def add_of_file(self, code: str, message: str, line: int | None = None) -> None:
        """Of the file as a whole; `line`: where it was seen."""
        self.found.append(BatchError(code, message, line))

    def check_line(self, number: int, fault: str, most: int) -> None:
        """Of a line that was not read. `most`: its bytes at most."""
        if fault == "too_long":
            message = f"The line has more than {most:,} bytes; shorten it ({limits.BODY.cited(most)})."
            self.found.append(BatchError("line_too_long", message, number))
        else:
            self.found.append(BatchError("invalid_json_line", "This line is not valid UTF-8.", number))

    def check_count(self, examples: int) -> None:
        """The file is read: whether there are enough, where nothing else is wrong."""
        if self.found:
            return
        least = LEAST_EXAMPLES if self.param == "training_file" else 1
        if not examples:
            self.add_of_file("empty_file", f"The {self._file} has no examples; send one JSON object on each line.")
        elif examples < least:
            self.add_of_file(
                "too_few_examples",
                f"The {self._file} has {examples} example, and at least {least} are needed; a few dozen are a good "
                "beginning.",
            )

    def error(self) -> TrainingError:
        """What the job ends with."""
        count = len(self.found)
        told = " ".join(sentence(fault) for fault in self.found[:_IN_MESSAGE])
        if count == 1:
            return TrainingError(CODE, f"The job failed due to an invalid {self._file}. {told}", self.param)
        many = f"{count} faults" if not self.full else f"at least {count} faults"
        rest = f" The job's events tell {'all' if not self.full else 'these'}." if count > _IN_MESSAGE else ""
        message = f"The job failed due to an invalid {self._file}, which has {many}. {told}{rest}"
        return TrainingError(CODE, message, self.param)


def sentence(fault: BatchError) -> str:
    """A fault as one sentence, with its line."""
    where = f"Line {fault.line}: " if fault.line is not None else ""
    return f"{where}{fault.message}"[:MAX_EVENT_MESSAGE]

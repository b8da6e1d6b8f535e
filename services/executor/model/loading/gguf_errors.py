"""What is wrong with the model of a GGUF file, said of that file: who has named it knows no config.json, and no
directory that was made of it.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ModelLoadError
from shared.models import linked_gguf

_NAMELESS = re.compile(r"The file(?= has | does | divides |'s )")
_OF_MODEL = re.compile(r"(?i)\bconfig\.json|^the (tensor|architecture|model says) ")
_REMEDY = "fetch it again, or choose another."


@contextlib.contextmanager
def told_of_file(place: Path) -> Iterator[None]:
    """Of what goes wrong within. `place`: a file, or a directory, which may lead to one."""
    try:
        yield
    except ModelLoadError as error:
        if place.is_dir() and not linked_gguf(place):
            raise
        file = linked_gguf(place)[0].readlink() if place.is_dir() else place
        raise ModelLoadError(_of_file(str(error), file)) from error


def _of_file(message: str, file: Path) -> str:
    if str(file) in message or not (_NAMELESS.match(message) or _OF_MODEL.search(message)):
        return message
    if _NAMELESS.match(message):
        return _NAMELESS.sub(lambda _: f"The file {file}", message, count=1)
    what, _, remedy = message.rstrip(".").partition("; ")
    if "config.json" in message:  # of a directory that is ours: nobody can mend it
        what = re.sub(r"^(The (?:weights|config\.json)) in \S+", r"\1", what)
        what, remedy = what.replace(", which config.json", ", which its configuration"), ""
        what = what.replace("where config.json", "where its configuration").replace("config.json", "configuration")
    return f"The file {file} cannot be used: {what[:1].lower()}{what[1:]}; {remedy or _REMEDY.rstrip('.')}."

"""What the command line and executors agree on about models: names in the model cache, which one fills and the other
reads, and of the parsers that an operator can choose (the gateway has the parsers themselves)."""

import hashlib
from pathlib import Path
from typing import Literal, get_args

from shared.errors import ModelLoadError

ToolParser = Literal[
    "auto",
    "none",
    "deepseek",
    "glm4",
    "granite",
    "hermes",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
]
"""How a model writes tool calls; `auto`: as its chat template shows, `none`: tools are refused."""

ReasoningParser = Literal["auto", "none", "think", "mistral"]
"""How a model marks its reasoning; `auto`: as its chat template shows, `none`: it is part of the answer."""

TOOL_PARSERS: tuple[str, ...] = get_args(ToolParser)
REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)


_SAMPLE_BYTES = 1 << 20


def pulled_name(name: str) -> str:
    """The directory's name for a model with the (hub) name `name`."""
    return name.replace("/", "--")


def converted_name(gguf: Path) -> str:
    """The directory's name for what a GGUF file is converted into, the same wherever the file lies.

    Made from the file's size, beginning and end. Raises `ModelLoadError`.
    """
    digest = hashlib.sha256()
    try:
        size = gguf.stat().st_size
        with gguf.open("rb") as stream:
            digest.update(str(size).encode() + stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read())
    except FileNotFoundError:
        raise ModelLoadError(f"The GGUF file {gguf} does not exist; check the path.") from None
    except OSError as error:
        raise ModelLoadError(f"The file {gguf} cannot be read ({error.strerror}); check the path.") from None
    return f"{gguf.stem}-{digest.hexdigest()[:12]}"

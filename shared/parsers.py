"""Names of the parsers that an operator can choose; the gateway has the parsers themselves."""

from typing import Literal, get_args

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

"""What the settings say of reading the model's text, for the gateways that read it."""

import msgspec

from services.executor.settings import ExecutorSettings
from shared.messages import ModelCard


def with_parsers(card: ModelCard, settings: ExecutorSettings) -> ModelCard:
    """`card` with the parsers that its operator has chosen."""
    return msgspec.structs.replace(
        card, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
    )

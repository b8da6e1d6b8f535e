"""Where a client stands in the log of a generation. Pure.

    tokens of a choice     t0   t1   t2   t3   (text ends)   (choice ends)
    position behind them      1    2    3    4             5               6

A position counts the tokens that have been read, not the text that was shown of them: what a half
character or the beginning of a stop string holds back depends on the tokens alone, so a reader that
begins anew and reads as many in silence has shown, and holds back, the very same. The end of the text and
the end of the choice count as one position each. The end of the text may show what was held back; at the
end of the choice its finish reason was sent.

A request with several choices has a position for each, in order: `4,6,0`.
"""

import re
from collections.abc import Sequence

from services.gateway.core.errors import InvalidField

END_OF_TEXT = 1
END_OF_CHOICE = 2  # positions behind the last token

_POSITIONS = re.compile(r"\d{1,10}(?:,\d{1,10})*")


def show(positions: Sequence[int]) -> bytes:
    """As the id of a server-sent event."""
    return b"%d" % positions[0] if len(positions) == 1 else ",".join(map(str, positions)).encode()


def parse(given: str, param: str = "Last-Event-ID") -> list[int]:
    """The positions in an event id. Raises `InvalidParameter`."""
    if len(given) > 2048 or not _POSITIONS.fullmatch(given):
        raise InvalidField(
            param,
            "expected the id of an event of this generation, such as 12, or 12,7 with two choices.",
            reason="invalid_position",
        )
    return [int(position) for position in given.split(",")]


def check(positions: Sequence[int], limits: Sequence[int], param: str = "Last-Event-ID") -> None:
    """Raises `InvalidParameter` unless there is a position for each choice, within its `limits` in tokens."""
    if len(positions) != len(limits):
        raise InvalidField(
            param,
            f"it has {len(positions)} positions and the generation {len(limits)} choices; "
            "send the id of one of its events.",
            reason="invalid_position",
        )
    for position, limit in zip(positions, limits, strict=True):
        if position > limit + END_OF_CHOICE:
            raise InvalidField(
                param,
                f"position {position} is beyond the end of the generation, "
                f"which has at most {limit} tokens; send the id of one of its events.",
                reason="invalid_position",
            )

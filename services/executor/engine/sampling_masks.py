"""Which tokens may follow in the rows of a step that have a grammar."""

from collections.abc import Sequence

from services.executor.engine.protocol import GrammarFailed
from services.executor.engine.sampling_state import Mask, SamplingState
from shared.errors import InvalidGrammar


def masks_of(states: Sequence[SamplingState]) -> dict[int, Mask]:
    """By row; those without a grammar are left out. Waits for masks that are being computed. Raises
    `GrammarFailed`."""
    masks: dict[int, Mask] = {}
    failed: list[int] = []
    reason = ""
    for row, state in enumerate(states):
        if state.grammar is None:
            continue
        try:
            masks[row] = state.grammar.allowed()
        except InvalidGrammar as error:
            failed.append(row)
            reason = reason or error.message
    if failed:
        raise GrammarFailed(reason, failed)
    return masks

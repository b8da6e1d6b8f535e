"""The kinds of state beside keys and values of every token. Taking a line out takes the kind out: models whose layers
keep it are refused, others are served as ever."""

from services.executor.families.registry import family_of
from services.executor.model.states.attention import BIASED_KEYS, CHUNKED, SHARED_KEYS
from services.executor.model.states.base import StateKind
from services.executor.model.states.convolutions import CONVOLVED_KEYS, SHORT_CONVOLUTION
from services.executor.model.states.delta_rules import GATED_DELTA, GATED_DELTA_BESIDE_NGRAMS, KIMI_DELTA
from services.executor.model.states.latent import CHOSEN_BLOCKS, COMPRESSED, INDEXED, LATENT
from services.executor.model.states.linear_attention import LIGHTNING, MATRIX_MEMORY, RWKV
from services.executor.model.states.scans import GATED_RECURRENCE, SELECTIVE_SCAN, STATE_SPACE
from shared.errors import ModelLoadError

STATE_KINDS: tuple[StateKind, ...] = (
    CHUNKED,
    COMPRESSED,
    LATENT,
    INDEXED,
    CHOSEN_BLOCKS,
    SHARED_KEYS,
    BIASED_KEYS,
    GATED_DELTA,
    GATED_DELTA_BESIDE_NGRAMS,
    KIMI_DELTA,
    LIGHTNING,
    RWKV,
    MATRIX_MEMORY,
    SHORT_CONVOLUTION,
    CONVOLVED_KEYS,
    SELECTIVE_SCAN,
    STATE_SPACE,
    GATED_RECURRENCE,
)


def state_kind(model_type: str) -> StateKind | None:
    """The kind that the layers of an architecture keep; None: keys and values alone. Raises `ModelLoadError` for one
    that is not listed."""
    name = family_of(model_type).states
    if name == "attention":
        return None
    kind = next((kind for kind in STATE_KINDS if kind.name == name), None)
    if kind is None:
        raise ModelLoadError(
            f"The layers of the architecture {model_type!r} keep {name} state, which this executor does not "
            "have; choose a model of another architecture."
        )
    return kind

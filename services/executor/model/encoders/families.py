"""What encoders of one family have in common that their configurations do not say."""

from typing import Any, NamedTuple

from services.executor.families.registry import family_of as declared_family
from services.executor.model.catalogue import longest_context
from shared.errors import ConfigurationError


class EncoderFamily(NamedTuple):
    # Whether texts of any lengths are computed as one flat batch, and the ranks share the heads.
    is_flat: bool
    first_position: int


def family_of(config: Any) -> EncoderFamily:
    """Of a transformers configuration."""
    declared = declared_family(config.model_type)
    first = (config.pad_token_id or 0) + 1 if declared.behind_padding else 0
    return EncoderFamily(not declared.one_rank, first)


def most_tokens_of(config: Any) -> int:
    """Tokens of the longest text, special ones included. Raises `ModelLoadError` where the configuration does not
    say."""
    return longest_context(config) - family_of(config).first_position


def check_ranks(config: Any, ranks: int) -> None:
    """Raises `ConfigurationError` where a model is computed by one rank, and there are more."""
    if ranks > 1 and not family_of(config).is_flat:
        raise ConfigurationError(
            f"Models of the type {config.model_type!r} are computed by one rank, and --tp is {ranks}; set it to 1."
        )

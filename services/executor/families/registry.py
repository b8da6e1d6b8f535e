"""All families, by `model_type`: a record is taken out of its list, and nothing else knows of it."""

from itertools import chain

from services.executor.families import dense, early, encoders, latent, mixtures, recurrent
from services.executor.families.family import ModelFamily

LISTS = (dense, early, latent, mixtures, recurrent)

DECODERS = {family.model_type: family for family in chain.from_iterable(one.FAMILIES for one in LISTS)}
# Models that read a text in both directions: for embeddings and classes.
ENCODERS = {family.model_type: family for family in encoders.FAMILIES}

_UNKNOWN = ModelFamily("")
_ALSO = {other: name for name, family in DECODERS.items() for other in family.also}


def family_of(model_type: object) -> ModelFamily:
    """The record of the type of a text model; of one that is not served, one that says nothing."""
    name = _ALSO.get(str(model_type), str(model_type))
    return DECODERS.get(name) or ENCODERS.get(name) or _UNKNOWN

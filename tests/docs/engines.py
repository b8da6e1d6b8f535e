"""The table of docs/engines.md: what of a request each engine does, as the code declares it."""

import msgspec

from services.executor.engines.catalog import CANNOT
from shared.engine_features import FEATURES, OF_RINGS
from shared.messages import GenerationRequest, SamplingParams

_FIELDS = {field.name for struct in (GenerationRequest, SamplingParams) for field in msgspec.structs.fields(struct)}


def table() -> str:
    lines = [f"| | {' | '.join(CANNOT)} |", f"| --- |{' --- |' * len(CANNOT)}"]
    for name, told in FEATURES.items():
        title = f"`{told}`" if told in _FIELDS else told
        does = ["refused" if name in (*OF_RINGS, *cannot) else "yes" for cannot in CANNOT.values()]
        lines.append(f"| {title} | {' | '.join(does)} |")
    return "\n".join(lines)

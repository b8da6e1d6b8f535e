"""What the checks of batches enforce beyond types, written into the schema of their request."""

from services.gateway.batches.endpoints import URLS
from services.gateway.batches.states import KEY_CHARACTERS, MAX_METADATA, VALUE_CHARACTERS, WINDOW
from services.gateway.files.expiry import ANCHOR, LEAST_EXPIRY, MOST_EXPIRY
from services.gateway.openapi.narrowing import Schema, narrow


def constrain_batches(components: dict[str, Schema]) -> None:
    """As `openapi.constraints.constrain`."""
    if "BatchCreate" in components:
        properties = components["BatchCreate"]["properties"]
        properties["endpoint"] = {"type": "string", "enum": list(URLS)}
        narrow(properties["completion_window"], "string", pattern=f"^(?=0*[1-9]){WINDOW}$")
        narrow(
            properties["metadata"],
            "object",
            maxProperties=MAX_METADATA,
            propertyNames={"type": "string", "maxLength": KEY_CHARACTERS},
            additionalProperties={"type": "string", "maxLength": VALUE_CHARACTERS},
        )
    if "ExpiresAfter" in components:
        properties = components["ExpiresAfter"]["properties"]
        narrow(properties["seconds"], "integer", minimum=LEAST_EXPIRY, maximum=MOST_EXPIRY)
        properties["anchor"] = {"const": ANCHOR, "default": ANCHOR}

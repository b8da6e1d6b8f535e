"""What the checks of batches enforce beyond types, written into the schema of their request."""

from services.gateway.batches.endpoints import URLS
from services.gateway.batches.states import WINDOW
from services.gateway.files.expiry import ANCHOR, LEAST_EXPIRY, MOST_EXPIRY
from services.gateway.openapi.narrowing import Schema, narrow


def constrain_batches(components: dict[str, Schema]) -> None:
    """As `openapi.constraints.constrain`."""
    if "BatchCreate" in components:
        properties = components["BatchCreate"]["properties"]
        properties["endpoint"] = {"type": "string", "enum": list(URLS)}
        narrow(properties["completion_window"], "string", pattern=f"^(?=0*[1-9]){WINDOW}$")
    if "ExpiresAfter" in components:
        properties = components["ExpiresAfter"]["properties"]
        narrow(properties["seconds"], "integer", minimum=LEAST_EXPIRY, maximum=MOST_EXPIRY)
        properties["anchor"] = {"const": ANCHOR, "default": ANCHOR}

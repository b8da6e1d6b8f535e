"""OpenAI's expiration policies. Pure."""

from services.gateway.errors import InvalidParameter
from services.gateway.requests.validation import check_range

ANCHOR = "created_at"
LEAST_EXPIRY, MOST_EXPIRY = 3600, 2_592_000


def expiry(anchor: str | None, seconds: int | None, param: str) -> float:
    """Seconds of an expiration policy, 0 where there is none. Raises `InvalidParameter`."""
    if anchor is None and seconds is None:
        return 0.0
    if anchor != ANCHOR:
        raise InvalidParameter(
            f"Invalid value for '{param}.anchor': supported values are: '{ANCHOR}'.",
            param=f"{param}.anchor",
            reason="invalid_value",
        )
    if seconds is None:
        raise InvalidParameter(
            f"Missing required parameter: '{param}.seconds'.",
            param=f"{param}.seconds",
            reason="missing_required_parameter",
        )
    check_range(f"{param}.seconds", seconds, LEAST_EXPIRY, MOST_EXPIRY)
    return float(seconds)

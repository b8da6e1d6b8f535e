"""Limits as clients see them: OpenAI's headers and words. Pure."""

import math

from services.gateway.errors import RateLimited

_WORDS = {
    "requests": ("requests per min (RPM)", "requests"),
    "tokens": ("tokens per min (TPM)", "tokens"),
    "concurrent": ("concurrent requests", "requests"),
}


def duration(seconds: float) -> str:
    """As OpenAI writes it: `120ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    tenths = math.ceil(seconds * 10)
    if tenths < 600:
        return f"{tenths / 10:g}s"
    whole = math.ceil(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{whole % 60}s"


def headers(what: str, limit: int, remaining: int, reset: float) -> dict[str, str]:
    """`what`: requests or tokens; `reset`: seconds until nothing is counted any more."""
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, min(limit, remaining))),
        f"x-ratelimit-reset-{what}": duration(reset),
    }


def reached(what: str, whose: str, *, limit: int, used: int, requested: int, wait: float) -> RateLimited:
    """Too much within this minute, or at this moment; `wait`: seconds after which it may be tried again."""
    words, kind = _WORDS[what]
    return RateLimited(
        f"Rate limit reached for {whose} on {words}: Limit {limit}, Used {used}, Requested {requested}. "
        f"Please try again in {duration(wait)}.",
        kind=kind,
        wait=wait,
    )


def too_large(whose: str, *, limit: int, requested: int) -> RateLimited:
    """No minute has room for this request."""
    return RateLimited(
        f"Request too large for {whose} on tokens per min (TPM): Limit {limit}, Requested {requested}. "
        "The input or output tokens must be reduced in order to run successfully.",
        kind="tokens",
    )

"""The setting `speculation`: `auto`, `off`, or the most drafts of one sequence in a step."""

MOST_DRAFTS = 15
"""For `auto`: with the sequence's own token 16, a KV block of the usual size. How many of them pay is decided for
each step."""
MOST_EVER = 63


def most_drafts(setting: str) -> int:
    """Drafts of one sequence at most. Raises ValueError with a phrase that says what is wrong."""
    if setting in ("auto", "off"):
        return MOST_DRAFTS if setting == "auto" else 0
    if not (setting.isascii() and setting.isdecimal() and int(setting) <= MOST_EVER):
        raise ValueError(f"{setting!r} is not auto, off or a number from 0 to {MOST_EVER}")
    return int(setting)

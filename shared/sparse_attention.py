"""Sparse attention as people ask for it: how it is written, what may be chosen, and which tokens it is about. Pure.

    models.yaml, REST    true    false    {kind: window, recent: 4096}
    command line         on      off      window,recent=4096

What the fields mean stands with `shared.messages.SparseAttention`; requests have them too, and each may be left out.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from shared.messages.generations import SparseAttention, SparseKind

KINDS: tuple[SparseKind, ...] = get_args(SparseKind)
MOST_TOKENS = 2**31 - 1  # of any of its numbers of tokens: a position is an int32
MOST_LAYERS = 4096
FIELDS = SparseAttention.__struct_fields__
_MOST = {"threshold": MOST_TOKENS, "sinks": MOST_TOKENS, "recent": MOST_TOKENS, "budget": MOST_TOKENS} | {
    "dense_layers": MOST_LAYERS
}
_SWITCH = {"on": True, "true": True, "off": False, "false": False}


class WrongChoice(ValueError):
    """`field` (empty: the whole) is invalid; the text is a phrase that says why, and what to do."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


class SparseTokens(NamedTuple):
    """Tokens at positions at which not everything before them is read."""

    prompt: int
    output: int


NO_SPARSE = SparseTokens(0, 0)


def check(choice: SparseAttention, page_tokens: int = 0) -> None:
    """Raises `WrongChoice` for the first thing that is wrong. `page_tokens`: of a KV block of the model; 0: not
    known."""
    for name, most in _MOST.items():
        if not 0 <= (value := getattr(choice, name)) <= most:
            raise WrongChoice(name, f"it is {value:,}, and must be 0 to {most:,}")
    if not (math.isfinite(choice.share) and 0 <= choice.share <= 1):
        raise WrongChoice("share", f"it is {choice.share:g}, and must be a share of the position, 0 to 1")
    always = choice.sinks + choice.recent
    if choice.threshold < always:
        raise WrongChoice(
            "threshold",
            f"it is {choice.threshold:,}, below the {always:,} tokens that are always read ({choice.sinks:,} sinks and "
            f"{choice.recent:,} recent ones); raise it to these, or lower 'sinks' or 'recent'",
        )
    if choice.kind == "pages" and choice.budget < max(1, page_tokens):
        page = f"one page of {page_tokens} tokens" if page_tokens else "one token"
        raise WrongChoice(
            "budget", f"it is {choice.budget:,}, below {page}; raise it, or ask for kind 'window', which reads none"
        )


def chosen(given: bool | SparseAttention | None) -> SparseAttention | None:
    """What a model's entry says of requests that say nothing; None: everything is read."""
    if isinstance(given, SparseAttention):
        return given
    return SparseAttention() if given else None


def keeps_pages(given: bool | SparseAttention | None) -> bool | None:
    """Whether groups that serve a model with this entry keep summaries of pages; None: as their host's settings say."""
    if given is None or isinstance(given, bool):
        return given
    return True if given.kind == "pages" else None


def read(given: object) -> bool | SparseAttention | None:
    """The value of a model's entry, from JSON, YAML or `parse`. Raises `WrongChoice`."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, Mapping):
        raise WrongChoice("", "it must be true, false, or a mapping of " + ", ".join(FIELDS))
    for name in given:
        if name not in FIELDS:
            raise WrongChoice("", f"it has no {str(name)[:80]!r}; there are: {', '.join(FIELDS)}")
    for name, value in given.items():
        _check_type(name, value)
    choice = msgspec.convert(dict(given), SparseAttention)
    check(choice)
    return True if choice == SparseAttention() else choice


def _check_type(name: str, value: Any) -> None:
    if name == "kind":
        if value not in KINDS:
            raise WrongChoice(name, f"it must be one of {', '.join(KINDS)}, not {str(value)[:80]!r}")
    elif isinstance(value, bool) or not isinstance(value, (int, float) if name == "share" else int):
        wanted = "a number from 0 to 1" if name == "share" else "a whole number"
        raise WrongChoice(name, f"it must be {wanted}, not {str(value)[:80]!r}")


def parse(text: str) -> bool | dict[str, Any] | None:
    """Of the command line, for `read`; empty: nothing is said of it. Raises `WrongChoice`."""
    if not text.strip():
        return None
    if (switch := _SWITCH.get(text.strip().lower())) is not None:
        return switch
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals and name in KINDS:
            name, value = "kind", name
        elif not equals:
            raise WrongChoice(
                "", f"{part.strip()[:80]!r} is none of on, off, {', '.join(KINDS)} and FIELD=VALUE, such as recent=2048"
            )
        found[name] = _number(value) if name != "kind" else value
    return found


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def to_argument(given: bool | SparseAttention | None) -> str:
    """As the command line takes it: for people, logs and traces."""
    if not isinstance(given, SparseAttention):
        return {True: "on", False: "off", None: ""}[given]
    fields = msgspec.to_builtins(given) | {"kind": given.kind}
    kind = fields.pop("kind")
    return ",".join([kind, *(f"{name}={value}" for name, value in fields.items())])


def sparse_tokens(choice: SparseAttention | None, prompt: int, output: int) -> SparseTokens:
    """Of a prompt of so many tokens and the output behind it."""
    if choice is None:
        return NO_SPARSE
    of_prompt = max(0, prompt - choice.threshold)
    return SparseTokens(of_prompt, max(0, prompt + output - choice.threshold) - of_prompt)

"""`ryzanstein models recommend`: models that fit this machine, with the speed that its memory allows."""

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
import psutil
import typer

from services.cli.machine import cores, memory_left, read_rate
from services.cli.recommended_models import MODELS, USES, Recommendation, fitting
from services.cli.ui import console, megabytes, print_columns, say
from shared.errors import ConfigurationError

_PLEASANT = 5.0  # Tokens/s below which nobody waits for an answer


def recommend(
    use: Annotated[str, typer.Option("--for", help="What it is for.", metavar="|".join(USES))] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List models that fit this machine: size, memory, the speed to expect of its memory, licence."""
    if use and use not in USES:
        raise ConfigurationError(f"--for cannot be {use!r}; it is one of: {', '.join(USES)}.")
    memory, threads = min(psutil.virtual_memory().total, memory_left()), cores()
    rate = read_rate(threads)
    wanted = [model for model in MODELS if use in ("", model.use)]
    found = fitting(wanted, memory, rate)
    if as_json:
        told = {"memory": memory, "cores": threads, "bandwidth": rate, "models": msgspec.to_builtins(found)}
        print(json.dumps(told))  # noqa: T201
        return
    screen = console()
    say(screen, f"{megabytes(memory)} of memory, {threads} cores, {rate / 1e9:.0f} GB/s:\n")
    print_columns(screen, _rows(found), right=(2, 3, 4))
    if larger := len(wanted) - len(found):
        say(screen, f"\n{larger} more need more memory than this machine has.")
    if best := _best([one for one in found if one.model.use == (use or USES[0])]):
        say(screen, f"\nTo serve one: ryzanstein up --model {best.model.name}")


def _rows(found: Sequence[Recommendation]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("model", "for", "size", "memory", "tokens/s", "licence", "good at")]
    for one in found:
        rate = one.tokens_per_second
        speed = f"{rate:,.0f}" if rate >= _PLEASANT else f"{rate:.1f}" if rate else "-"
        sizes = megabytes(one.model.bytes), megabytes(one.memory)
        rows.append((one.model.name, one.model.use, *sizes, speed, one.model.licence, one.model.about))
    return rows


def _best(found: Sequence[Recommendation]) -> Recommendation | None:
    """The largest that answers at a pleasant speed; where none does, the fastest."""
    pleasant = [one for one in found if one.tokens_per_second >= _PLEASANT or one.model.use == "embeddings"]
    return max(pleasant or found, key=lambda one: one.model.bytes if pleasant else one.tokens_per_second, default=None)

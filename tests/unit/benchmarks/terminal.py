"""What a report looks like on a terminal."""

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Sheet, show


def shown(*parts: Sheet | Table | str) -> str:
    console = Console(width=220)
    with console.capture() as captured:
        show(*parts, console=console)
    return captured.get()

"""Operations as data, and the scripts that are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One operation: the name of a method of `plain.Plain`, `buckets.Buckets`, `services.Services` or `runner.Run`."""

    name: str
    by: str = "a"  # whose connection does it; it is opened when it is first named
    args: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value!r}" for name, value in self.args.items())
        return f"{self.by}: {self.name}({args})"


def do(name: str, by: str = "a", /, **args: Any) -> Step:
    return Step(name, by, args)


@dataclass(frozen=True)
class Script:
    name: str
    needed_by: str  # the modules that depend on what it asks
    steps: tuple[Step, ...]
    room: int = 0  # bytes that the server has for its streams; 0: as much as it likes
    users: bool = False  # a user for each service, with its rights; connections are named after them


def script(name: str, needed_by: str, *steps: Step, **more: Any) -> Script:
    return Script(name, needed_by, steps, **more)

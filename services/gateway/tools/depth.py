"""How deeply JSON is nested: templates and encoders go down it by recursion. Pure."""

from typing import Any

DEEPEST = 100
"""Levels of objects and arrays that anybody may send."""


def too_deep(value: Any) -> bool:
    """Whether `value` has more levels than `DEEPEST`."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)

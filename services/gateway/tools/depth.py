"""How deeply JSON is nested: templates and encoders go down it by recursion. Pure."""

from typing import Any

from shared.limits import NESTING


def too_deep(value: Any) -> bool:
    """Whether `value` has more levels than the limit `nesting`."""
    level = [value]
    for _ in range(NESTING.value + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)

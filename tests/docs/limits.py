"""The table of docs/security.md: every bound of `shared/limits.py`. Pure."""

from shared.limits import LIMITS, Limit


def table() -> str:
    lines = ["| limit | of each | at most | what (setting) |", "| --- | --- | --- | --- |"]
    for limit in LIMITS:
        most = f"{_number(limit)} {limit.unit}" if limit.value else "as the model has"
        setting = f" (`{limit.setting}`)" if limit.setting else ""
        lines.append(f"| `{limit.name}` | {limit.holder} | {most} | {limit.bounds}{setting} |")
    return "\n".join(lines)


def _number(limit: Limit) -> str:
    value = limit.value
    if limit.unit == "bytes":
        for size, name in ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki")):
            if value >= size and not value % size:
                return f"{value // size:g} {name}"
    return f"{value:,}"

"""The table of docs/tools.md: how each family of models writes its calls. Pure."""

from services.gateway.tool_calls.families import FAMILIES


def table() -> str:
    rows = ["| parser | a call | models |", "| --- | --- | --- |"]
    for name, family in FAMILIES.items():
        names = ", ".join(f"`{one}`" for one in (name, *family.names))
        form = family.form.replace("\n", "").replace("|", "\\|")
        rows.append(f"| {names} | `{form}` | {family.models} |")
    return "\n".join(rows)

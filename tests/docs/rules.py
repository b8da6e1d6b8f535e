"""The table of docs/api.md: what fields of a request demand of each other. Pure."""

import services.gateway.dialects.registry  # noqa: F401  their rules are among the rest
from services.gateway.intake import rules


def table() -> str:
    """A rule that several structs have stands once, with the first of them."""
    lines = ["| of | where | there must be | else |", "| --- | --- | --- | --- |"]
    names: dict[int, list[str]] = {}
    each = {id(rule): rule for _, own in rules.table() for rule in own}
    for name, own in rules.table():
        for rule in own:
            names.setdefault(id(rule), []).append(f"`{name}`")
    for key, rule in each.items():
        lines.append(f"| {', '.join(names[key])} | {_row(rule)} |")
    return "\n".join(lines)


def _row(rule: rules.Rule | rules.OneOf) -> str:
    if isinstance(rule, rules.OneOf):
        where = f"`{rule.tag}` names it" if rule.tag else ""
        ways = (" with ".join(f"`{name}`" for name in way) for way in rule.ways)
        return f"{where} | {', or '.join(ways)} | {_sentence(rule.repeats or rule.lacks)}"
    where = f"`{rule.field}` is {rule.when.words}" if rule.field else ""
    wanted, join = (rule.needs, ", ") if rule.needs else (rule.needs_one, ", or ")
    needed = join.join(f"`{name}` {condition.words}" for name, condition in wanted.items())
    return f"{where} | {needed} | {_sentence(rule.error)}"


def _sentence(error: str) -> str:
    return error.format(at="", field="…", model="the model")

"""The tables of docs/alerts.md and docs/runbooks/README.md, made from the rules and the runbooks."""

import re

from tests.alerts import rules, runbooks


def alerts_table() -> str:
    """What each alert asks, and how long it must be so."""
    rows = ["| alert | | fires when | for |", "| --- | --- | --- | --- |"]
    for alert in rules.alerts(rules.load()):
        name, expression = alert["alert"], " ".join(alert["expr"].split()).replace("|", "\\|")
        link = f"[{name.removeprefix('Ryzanstein')}](runbooks/{rules.kebab(name)}.md)"
        rows.append(f"| {link} | {alert['labels']['severity']} | `{expression}` | {alert.get('for', '0s')} |")
    return "\n".join(rows)


def index_table() -> str:
    """What each alert means, and how long its repair takes."""
    rows = ["| alert | | means | expected recovery |", "| --- | --- | --- | --- |"]
    for alert in rules.alerts(rules.load()):
        name = rules.kebab(alert["alert"])
        text = (runbooks.RUNBOOKS / f"{name}.md").read_text()
        means, expected = (_paragraph(r"\*\*\w+\*\* · ", text), _paragraph(r"\*\*Expected\*\*: ", text))
        severity = alert["labels"]["severity"]
        rows.append(f"| [{alert['alert']}]({name}.md) | {severity} | {means} | {_plain(expected)} |")
    return "\n".join(rows)


def _paragraph(beginning: str, text: str) -> str:
    """What follows the `beginning`, a pattern, up to the paragraph's end, as one line."""
    found = re.search(rf"(?m)^{beginning}((?:.+\n?)+)", text)
    assert found is not None, beginning
    return " ".join(found[1].split())


def _plain(text: str) -> str:
    """Without links, which lead from another folder."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)

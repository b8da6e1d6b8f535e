"""The tables of docs/metrics.md: every metric there is, read from the services' registries."""

from tests.monitoring.catalogue import Entry, catalogue

_TITLES = {
    "": "Every service",
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "health-monitor": "Health monitor",
    "executor": "Executor",
}


def tables() -> str:
    """A section for each service, and one for vLLM's names."""
    parts = []
    aliases: list[tuple[str, Entry]] = []
    for service, entries in catalogue().items():
        own = [entry for entry in entries if not entry.alias_of]
        aliases += [(service, entry) for entry in entries if entry.alias_of]
        rows = [f"| `{e.name}` | {e.type} | {_labels(e)} | {e.meaning} |" for e in own]
        table = ["| name | type | labels | meaning |", "| --- | --- | --- | --- |", *rows]
        parts.append("\n".join([f"## {_TITLES[service]}", "", *table, ""]))
    rows = [f"| `{e.name}` | {service} | {_labels(e)} | `{e.alias_of}` |" for service, e in aliases]
    table = ["| name | on | labels | the same as |", "| --- | --- | --- | --- |", *rows]
    parts.append("\n".join(["## vLLM's names", "", *table, ""]))
    return "\n".join(parts)


def _labels(entry: Entry) -> str:
    return ", ".join(f"`{label}`" for label in entry.labels)

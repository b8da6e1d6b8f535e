"""The page `docs/openai-compatibility.md` and the tables of `docs/openai-parameters.md`, from what was found. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from tests.compatibility.operations import EXCLUDED, REFUSED, why_refused
from tests.compatibility.probe import Found, Row

COMMAND = "python -m tests.compatibility"
WORDS = {"honoured": "taken", "partly": "taken in part", "refused": "refused by name", "missing": "**missing**"}


class Count:
    """Of rows: how many there are, and what has become of them."""

    def __init__(self, rows: Iterable[Row]) -> None:
        listed = list(rows)
        self.all, self.meant = len(listed), sum(not row.excluded for row in listed)
        self.honoured = sum(row.verdict == "honoured" for row in listed)
        self.honoured_of_meant = sum(row.verdict == "honoured" and not row.excluded for row in listed)
        self.partly = sum(row.verdict == "partly" for row in listed)
        self.refused = sum(row.verdict == "refused" for row in listed)
        self.missing = sum(row.verdict == "missing" for row in listed)

    @property
    def all_taken(self) -> bool:
        return self.honoured == self.all

    @property
    def share_of_all(self) -> str:
        return _share(self.honoured, self.all)

    @property
    def share_of_meant(self) -> str:
        return _share(self.honoured_of_meant, self.meant)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def page(found: Sequence[Found], package: str) -> str:
    """`package`: the version of the official package whose types were walked."""
    return "\n".join([_head(package), _summary(found)])


def tables(found: Sequence[Found], package: str) -> str:
    """Every parameter of every operation, and why some are not taken. Not committed: it is many times the page."""
    head = f"# Every parameter of OpenAI's API\n\nMade by `{COMMAND}` from the types of openai {package}.\n"
    events = "\n".join(_events_left_out([row for one in found for row in one.events]))
    return "\n".join([head, _refused(found), _excluded(), events, "", *(_operation(one) for one in found)])


def _head(package: str) -> str:
    return f"""# OpenAI compatibility

Every parameter in the type definitions of the official Python package (openai {package}), nested ones included, is sent
to a server on the stub engine: `{COMMAND}`, held by a test. The same command, which `make docs`
runs, writes the verdict of each parameter, with the reason where it is not taken, to `docs/openai-parameters.md`; the
site has it.

- **taken**: a request with it is answered, for every value that its type lists (unknown fields are refused, so what is
  taken is read). Tests of each field ([fields](api.md#fields)) hold the *effect*. A query field counts only where a
  nonsense value is refused or changes the result. What [changes nothing](api.md#what-changes-nothing) is taken too,
  and a header of the answer names it. The stub's chat template reads `reasoning_effort` and `verbosity`; where a
  model's template does not, the header names the first and the second is refused.
- **taken in part**: some of its values are refused by name. It does not count as taken.
- **refused by name**: the error names it. **missing**: there is no such operation or parameter.
- **Without a meaning here**, and left out of the last two columns: images, audio, and what runs or is kept at OpenAI
  (hosted tools, moderation, encrypted content, prompt templates).
- With a meaning and not taken: `file_url` (the server fetches nothing that clients name), reinforcement fine-tuning,
  `async` and `allowed_callers` of tools, Lark's `syntax` of custom tools, `suffix`, `comparison_response_id`.
"""


def _summary(found: Sequence[Found]) -> str:
    lines = [
        "| parameters of | there | in all | taken | in part | refused | missing | of all | with a meaning | of these |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    whole = [one for one in found if one.there and Count(one.parameters).all_taken]
    for one in found:
        if one not in whole:
            there = "yes" if one.there else "no"
            lines.append(_summary_line(f"`{one.operation.name}`", there, one.parameters))
    lines.append(_summary_line("**all**", "", [row for one in found for row in one.parameters]))
    lines += ["", f"The other {len(whole)} operations are there, with all of their parameters taken."]
    lines += _own(found)
    fields = [row for one in found for row in one.fields]
    events = [row for one in found for row in one.events]
    lines += [
        "",
        "What is sent, and how much of it was seen in the answers to all these requests:",
        "",
        "| | in all | seen | of all | with a meaning here | of these |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in (("fields of answers and chunks", fields), ("types of stream events", events)):
        count = Count(rows)
        shares = f"{count.share_of_all} | {count.meant} | {count.share_of_meant}"
        lines.append(f"| {name} | {count.all} | {count.honoured} | {shares} |")
    return "\n".join(lines) + "\n"


def _events_left_out(events: Sequence[Row]) -> list[str]:
    """By their reasons: what is left out improves a share, so it is named."""
    reasons: dict[str, list[str]] = {}
    for row in events:
        if row.excluded:
            reasons.setdefault(row.excluded, []).append(f"`{row.path.removeprefix('response.')}`")
    lines = ["", "Types of stream events without a meaning here (each begins with `response.`):", ""]
    return lines + [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]


def refused(found: Sequence[Found]) -> list[tuple[str, Row]]:
    """(operation, parameter) of all that have a meaning here and are not taken wholly."""
    return [
        (one.operation.name, row)
        for one in found
        for row in one.parameters
        if not row.excluded and row.verdict != "honoured"
    ]


def _refused(found: Sequence[Found]) -> str:
    counts = Counter(why_refused(operation, row.path) for operation, row in refused(found))
    names: dict[str, dict[str, None]] = {}
    for operation, row in refused(found):
        name = "compaction_trigger" if "compaction_trigger" in row.path else row.path.rpartition(".")[2]
        names.setdefault(why_refused(operation, row.path), {})[f"`{name}`"] = None
    lines = ["## With a meaning, and not taken", "", "| parameters | how many | why |", "| --- | ---: | --- |"]
    lines += [
        f"| {', '.join(names[reason])} | {counts[reason]} | {reason} |" for _, reason in REFUSED if counts[reason]
    ]
    return "\n".join(lines) + "\n"


def _own(found: Sequence[Found]) -> list[str]:
    """Without what is nested: a message of one role has as many parameters as a whole request."""
    lines = [
        "",
        "The same for a request's own parameters alone, without what is nested in them, where not all are taken:",
        "",
        "| parameters of | in all | with a meaning | taken | in part | at least in part |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    named = [(f"`{one.operation.name}`", one.parameters) for one in found]
    for name, rows in [*named, ("**all**", [row for one in found for row in one.parameters])]:
        meant = [row for row in rows if not row.excluded and not set(row.path) & set(".[")]
        if not meant:
            continue
        own = sum(not set(row.path) & set(".[") for row in rows)
        count = Count(meant)
        if count.all_taken and name != "**all**":
            continue
        share = _share(count.honoured + count.partly, count.meant)
        lines.append(f"| {name} | {own} | {count.meant} | {count.honoured} | {count.partly} | {share} |")
    return lines


def _summary_line(name: str, there: str, rows: Sequence[Row]) -> str:
    count = Count(rows)
    numbers = f"{count.all} | {count.honoured} | {count.partly} | {count.refused} | {count.missing}"
    return f"| {name} | {there} | {numbers} | {count.share_of_all} | {count.meant} | {count.share_of_meant} |"


def _excluded() -> str:
    lines = ["## Without a meaning here", "", "| parameters and events whose path matches | why |", "| --- | --- |"]
    for pattern, reason in EXCLUDED:
        escaped = pattern.replace("|", "\\|")
        lines.append(f"| `{escaped}` | {reason} |")
    return "\n".join(lines) + "\n"


def _operation(one: Found) -> str:
    lines = [f"## `{one.operation.name}`", "", f"`{one.operation.method} /v1{one.operation.path}`", ""]
    if one.parameters:
        lines += ["| parameter | |", "| --- | --- |", *_lines(one.parameters), ""]
    unseen = [row.path for row in one.fields if row.verdict != "honoured" and not row.excluded]
    if one.there and unseen:
        lines += ["Of the answer not seen: " + ", ".join(f"`{path}`" for path in unseen) + ".", ""]
    missing = [row.path for row in one.events if row.verdict != "honoured" and not row.excluded]
    if one.there and missing:
        lines += ["Of the stream's events not seen: " + ", ".join(f"`{name}`" for name in missing) + ".", ""]
    return "\n".join(lines)


def _lines(rows: Sequence[Row]) -> Iterable[str]:
    """A line for each, and one for what is excluded together."""
    for (excluded, verdict, _), several in groupby(rows, key=_together):
        listed = list(several)
        note = f"{WORDS[verdict]}; {excluded}" if excluded else WORDS[verdict]
        if listed[0].not_taken:
            note += ", without " + ", ".join(f"`{value}`" for value in listed[0].not_taken)
        if len(listed) > 1:
            yield f"| `{listed[0].path}` and {len(listed) - 1} more | {note} |"
        else:
            yield f"| `{listed[0].path}` | {note} |"


def _together(row: Row) -> tuple[str, str, str]:
    """Rows of one excluded thing share a line."""
    return (row.excluded, row.verdict, "" if row.excluded else row.path)

"""Reads a Dockerfile as far as our tests ask: stages, what they are made from, and their instructions."""

import json
import re
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction; `text` is what follows its keyword, on one line."""

    keyword: str
    text: str

    def exec_form(self) -> list[str]:
        """The words of a JSON array, as the exec form has them; [] in another form."""
        array = self.text[self.text.find("[") :] if "[" in self.text else "[]"
        words: list[str] = json.loads(array)
        return words


class Stage(NamedTuple):
    """What stands between two FROMs."""

    name: str
    base: str
    instructions: list[Instruction]


class Dockerfile:
    """Stages by name, and the defaults of the arguments before the first."""

    def __init__(self, path: Path) -> None:
        self.arguments: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        for keyword, text in _instructions(path.read_text()):
            if keyword == "FROM":
                base, _as, name = text.split()
                last = self.stages[name] = Stage(name, base, [])
            elif not self.stages:
                name, _equals, value = text.partition("=")
                self.arguments[name] = value
            else:
                last.instructions.append(Instruction(keyword, text))

    def lineage(self, name: str) -> list[Stage]:
        """The stage and those that it is made from, the first one first."""
        stage = self.stages[name]
        return [*(self.lineage(stage.base) if stage.base in self.stages else []), stage]

    def last(self, name: str, keyword: str) -> Instruction:
        """The one that holds in an image of that target. Fails where there is none."""
        found = [one for stage in self.lineage(name) for one in stage.instructions if one.keyword == keyword]
        assert found, f"{name} has no {keyword}"
        return found[-1]

    def contents(self, name: str) -> list[Stage]:
        """All stages that the target is made from, or copies from, at whatever distance."""
        found: dict[str, Stage] = {}
        names = [name]
        while names:
            stage = self.stages.get(names.pop())
            if stage is None or stage.name in found:
                continue
            found[stage.name] = stage
            names += [stage.base, *re.findall(r"--from=(\S+)", " ".join(i.text for i in stage.instructions))]
        return list(found.values())


def _instructions(text: str) -> list[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    return [
        Instruction(line.split()[0].upper(), line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()
    ]

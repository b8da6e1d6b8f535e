"""`models.yaml`: what a cluster is to serve, as a file that is kept with the rest of its configuration. Pure.

    models:
      - name: chat
        source: bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M
        least: 1
        most: 3
        pinned: true
        aliases: [gpt-4o-mini]
        settings: {tp: 1, context_length: 8192}

A file with an error is refused whole, and every error is told with its line.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from shared.errors import ConfigurationError
from shared.messages.registry import MAX_MODELS, ModelSpec
from shared.registry import DECLARED, Problem, problems_of, read_partly, unknown_field

MAX_BYTES = 4 << 20
"""Of a file."""
MAX_TOLD = 100
"""Errors that are told of one file."""


class ModelsFileError(ConfigurationError):
    """A models file that cannot be applied; nothing of it was."""

    def __init__(self, where: str, problems: list[str]) -> None:
        told = problems[:MAX_TOLD]
        if len(problems) > MAX_TOLD:
            told.append(f"and {len(problems) - MAX_TOLD} more")
        count = f"{len(problems)} error{'s' * (len(problems) > 1)}"
        super().__init__("\n  ".join([f"{where} has {count}; nothing was applied:", *told]))
        self.problems = problems
        """Each one sentence, with its line."""


def read_models_file(text: str | bytes, where: str = "models.yaml") -> list[ModelSpec]:
    """The models that a file declares, in its order. Raises `ModelsFileError`; `where` names the file in it."""
    if len(text) > MAX_BYTES:
        raise ModelsFileError(where, [f"it has more than {MAX_BYTES >> 20} MB"])
    found: list[tuple[int, str]] = []
    specs: list[ModelSpec] = []
    lines: dict[str, int] = {}
    for number, entry in enumerate(_entries(_document(text, where), found)):
        if number == MAX_MODELS:
            found.append((_line(entry), f"The registry holds {MAX_MODELS} models at most."))
            break
        spec, at = _read_entry(entry, found)
        if spec is None:
            continue
        if spec.name in lines:
            found.append(
                (at.get("name", 0), f"The model {spec.name!r} stands in line {lines[spec.name]} already.")
            )
            continue
        lines[spec.name] = at.get("name", at[""])
        found += [(_at(at, problem), problem.text) for problem in problems_of(spec, specs)]
        specs.append(spec)
    if found:
        raise ModelsFileError(where, [f"line {line}: {problem}" for line, problem in sorted(found)])
    return specs


def to_yaml(specs: Iterable[ModelSpec]) -> str:
    """A file that declares these models; what is as it is by default is left out."""
    import yaml

    models = []
    for spec in specs:
        # `most` is never left out: a file that says no more than `least` means as many.
        entry = {"name": spec.name, "source": spec.source, "most": spec.most}
        built = msgspec.to_builtins(spec)
        models.append(
            {key: value for key in DECLARED if (value := {**built, **entry}.get(key)) not in (None, {}, [])}
        )
    text: str = yaml.safe_dump({"models": models}, sort_keys=False, allow_unicode=True, width=120)
    return text


def _document(text: str | bytes, where: str) -> Any:
    """The file's tree, whose nodes know their lines."""
    import yaml  # for those alone who read such a file

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ModelsFileError(where, [f"line {line}: It is not YAML ({error.problem})."]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ModelsFileError(where, [f"It is not YAML ({' '.join(str(error).split())[:200]})."]) from None
    except RecursionError:
        raise ModelsFileError(where, ["It is nested too deeply."]) from None
    if tree is None:
        raise ModelsFileError(where, ["It is empty; write `models: []` for no models."])
    return tree


def _entries(tree: Any, found: list[tuple[int, str]]) -> list[Any]:
    """The nodes of the models."""
    import yaml

    if not isinstance(tree, yaml.MappingNode):
        found.append((_line(tree), "The file is a mapping with the key `models`."))
        return []
    pairs = _pairs(tree, "", found)
    found += [
        (_line(key), unknown_field("", name, ["models"]).text)
        for name, (key, _) in pairs.items()
        if name != "models"
    ]
    if "models" not in pairs:
        found.append((_line(tree), "The key `models` is missing: a list of models."))
        return []
    value = pairs["models"][1]
    if not isinstance(value, yaml.SequenceNode):
        found.append((_line(value), "`models` is a list of models."))
        return []
    return list(value.value)


def _read_entry(entry: Any, found: list[tuple[int, str]]) -> tuple[ModelSpec | None, dict[str, int]]:
    """A model, as far as it can be read, and the line of each field; "": of the entry."""
    import yaml

    at = {"": _line(entry)}
    if not isinstance(entry, yaml.MappingNode):
        found.append((at[""], "A model is a mapping with a `name`."))
        return None, at
    spec, problems = read_partly(_fields(entry, "", at, found))
    found += [(_at(at, problem), problem.text) for problem in problems]
    return spec, at


def _fields(node: Any, within: str, at: dict[str, int], found: list[tuple[int, str]]) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for name, (key, value) in _pairs(node, within, found).items():
        at[f"{within}{name}"] = _line(key)
        if name == "settings" and not within and isinstance(value, yaml.MappingNode):
            values[name] = _fields(value, "settings.", at, found)
        else:
            values[name] = _plain(value)
    return values


def _pairs(node: Any, within: str, found: list[tuple[int, str]]) -> dict[str, tuple[Any, Any]]:
    """Key and value nodes of a mapping by name; what is there twice is told."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for key, value in node.value:
        name = str(key.value)[:100] if not isinstance(key.value, list) else "?"
        if name in pairs:
            found.append((_line(key), f"`{within}{name}` stands in line {_line(pairs[name][0])} already."))
        else:
            pairs[name] = key, value
    return pairs


def _plain(node: Any) -> Any:
    """The value of a node that is a scalar or a list of scalars; what is neither as an empty one of its kind, which no
    field takes."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_scalar(part) for part in node.value]
    return _scalar(node)


def _scalar(node: Any) -> Any:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return []
    if isinstance(node, yaml.MappingNode):
        return {}
    try:
        return yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError):  # a tag of its own, or a date that is none
        return str(node.value)


def _at(at: dict[str, int], problem: Problem) -> int:
    return at.get(problem.field) or at.get(problem.field.partition(".")[0]) or at[""]


def _line(node: Any) -> int:
    line: int = node.start_mark.line
    return line + 1

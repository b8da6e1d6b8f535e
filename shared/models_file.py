"""`models.yaml`: what a cluster is to serve, as a file that is kept with the rest of its configuration. Pure.

    models:
      - name: chat
        source: bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M
        least: 1
        most: 3
        pinned: true
        aliases: [gpt-4o-mini]
        settings: {tp: 1, context_length: 8192}
        sparse_attention: {budget: 4096}
        adapters:
          sql: /models/adapters/sql
          legal: {source: org/legal-lora, revision: v2}

A file with an error is refused whole, and every error is told with its line. Needs YAML: imported by those alone who
read or write such a file.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import yaml

from shared.errors import ConfigurationError
from shared.messages.registry import MAX_ADAPTERS, MAX_MODELS, ModelSpec
from shared.registry import (
    DECLARED,
    MAX_NAME,
    DeclaredAdapter,
    Problem,
    adapter_problems,
    problems_of,
    read_partly,
    unknown_field,
)

MAX_BYTES = 4 << 20  # of a file
MAX_TOLD = 100  # errors that are told of one file
_KEYS = (*DECLARED, "adapters")
_MAPPINGS = ("settings", "sparse_attention")  # fields of a model that may be mappings
_ADAPTER_KEYS = ("source", "revision")


class ModelsFileError(ConfigurationError):
    """A models file that cannot be applied; nothing of it was."""

    def __init__(self, where: str, problems: list[str]) -> None:
        told = problems[:MAX_TOLD]
        if len(problems) > MAX_TOLD:
            told.append(f"and {len(problems) - MAX_TOLD} more")
        count = f"{len(problems)} error{'s' * (len(problems) > 1)}"
        super().__init__("\n  ".join([f"{where} has {count}; nothing was applied:", *told]))
        self.problems = problems  # each one sentence, with its line


class Declaration(NamedTuple):
    """What a file declares, in its order."""

    models: list[ModelSpec]
    adapters: list[DeclaredAdapter]


def read_models_file(text: str | bytes, where: str = "models.yaml") -> Declaration:
    """What a file declares. Raises `ModelsFileError`; `where` names the file in it."""
    if len(text) > MAX_BYTES:
        raise ModelsFileError(where, [f"it has more than {MAX_BYTES >> 20} MB"])
    found: list[tuple[int, str]] = []
    specs: list[ModelSpec] = []
    lines: dict[str, int] = {}
    adapters: list[tuple[int, DeclaredAdapter]] = []
    for number, entry in enumerate(_entries(_document(text, where), found)):
        if number == MAX_MODELS:
            found.append((_line(entry), f"The registry holds {MAX_MODELS} models at most."))
            break
        spec, at, own = _read_entry(entry, found)
        if spec is None:
            continue
        if spec.name in lines:
            found.append((at.get("name", 0), f"The model {spec.name!r} stands in line {lines[spec.name]} already."))
            continue
        lines[spec.name] = at.get("name", at[""])
        found += [(_at(at, problem), problem.text) for problem in problems_of(spec, specs)]
        specs.append(spec)
        adapters += own
    found += _wrong_adapters(adapters, specs)
    if found:
        raise ModelsFileError(where, [f"line {line}: {problem}" for line, problem in sorted(found)])
    return Declaration(specs, [adapter for _, adapter in adapters])


def to_yaml(specs: Iterable[ModelSpec], adapters: Iterable[DeclaredAdapter] = ()) -> str:
    """A file that declares these models and adapters; what is as it is by default is left out. Adapters of other models
    are left out too."""
    own: dict[str, dict[str, Any]] = {}
    for adapter in adapters:
        whole = {"source": adapter.source, "revision": adapter.revision}
        own.setdefault(adapter.model, {})[adapter.name] = whole if adapter.revision else adapter.source
    models = []
    for spec in specs:
        # `most` is never left out: a file that says no more than `least` means as many.
        entry = {"name": spec.name, "source": spec.source, "most": spec.most, "adapters": own.get(spec.name)}
        built = {**msgspec.to_builtins(spec), **entry}
        models.append({key: value for key in _KEYS if (value := built.get(key)) not in (None, {}, [])})
    text: str = yaml.safe_dump({"models": models}, sort_keys=False, allow_unicode=True, width=120)
    return text


def _document(text: str | bytes, where: str) -> Any:
    """The file's tree, whose nodes know their lines."""
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
    if not isinstance(tree, yaml.MappingNode):
        found.append((_line(tree), "The file is a mapping with the key `models`."))
        return []
    pairs = _pairs(tree, "", found)
    found += [
        (_line(key), unknown_field("", name, ["models"]).text) for name, (key, _) in pairs.items() if name != "models"
    ]
    if "models" not in pairs:
        found.append((_line(tree), "The key `models` is missing: a list of models."))
        return []
    value = pairs["models"][1]
    if not isinstance(value, yaml.SequenceNode):
        found.append((_line(value), "`models` is a list of models."))
        return []
    return list(value.value)


def _read_entry(
    entry: Any, found: list[tuple[int, str]]
) -> tuple[ModelSpec | None, dict[str, int], list[tuple[int, DeclaredAdapter]]]:
    """A model, as far as it can be read, the line of each field ("": of the entry), and its adapters with theirs."""
    at = {"": _line(entry)}
    if not isinstance(entry, yaml.MappingNode):
        found.append((at[""], "A model is a mapping with a `name`."))
        return None, at, []
    pairs = _pairs(entry, "", found)
    adapters = pairs.pop("adapters", None)
    spec, problems = read_partly(_fields(pairs, "", at, found))
    found += [(_at(at, problem), problem.text) for problem in problems]
    name = "" if spec is None else spec.name
    return spec, at, [] if adapters is None else _read_adapters(adapters[1], name, found)


def _read_adapters(node: Any, model: str, found: list[tuple[int, str]]) -> list[tuple[int, DeclaredAdapter]]:
    if not isinstance(node, yaml.MappingNode):
        found.append((_line(node), "`adapters` is a mapping of names and sources."))
        return []
    adapters = []
    for name, (key, value) in _pairs(node, "adapters.", found, MAX_NAME + 1).items():
        at: dict[str, int] = {}
        if isinstance(value, yaml.MappingNode):
            within = f"adapters.{name[:100]}."
            fields = _fields(_pairs(value, within, found), within, at, found)
            found += [
                (at[f"{within}{one}"], unknown_field(within, one, _ADAPTER_KEYS).text)
                for one in fields
                if one not in _ADAPTER_KEYS
            ]
        else:
            fields = {"source": _plain(value)}
        given = [fields.get("source", ""), fields.get("revision", "")]
        if all(isinstance(one, str) for one in given):
            adapters.append((_line(key), DeclaredAdapter(name, model, *given)))
        else:
            found.append(
                (
                    _line(key),
                    f"The adapter {name[:100]!r} is a source, or a mapping with a `source` and a `revision`, all "
                    "of them text.",
                )
            )
    return adapters


def _wrong_adapters(adapters: list[tuple[int, DeclaredAdapter]], specs: list[ModelSpec]) -> Iterable[tuple[int, str]]:
    names = {name: spec for spec in specs for name in (spec.name, *spec.aliases)}
    lines: dict[str, int] = {}
    for line, adapter in adapters:
        beside = {id(spec): spec for name in (adapter.name, adapter.model) if (spec := names.get(name))}
        for problem in adapter_problems(adapter, beside.values()):
            yield line, problem.text
        if adapter.name in lines:
            yield line, f"The adapter {adapter.name[:100]!r} stands in line {lines[adapter.name]} already."
        lines.setdefault(adapter.name, line)
    if len(adapters) > MAX_ADAPTERS:
        yield adapters[MAX_ADAPTERS][0], f"The registry holds {MAX_ADAPTERS:,} adapters at most."


def _fields(
    pairs: dict[str, tuple[Any, Any]], within: str, at: dict[str, int], found: list[tuple[int, str]]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, (key, value) in pairs.items():
        at[f"{within}{name}"] = _line(key)
        if name in _MAPPINGS and not within and isinstance(value, yaml.MappingNode):
            values[name] = _fields(_pairs(value, f"{name}.", found), f"{name}.", at, found)
        else:
            values[name] = _plain(value)
    return values


def _pairs(node: Any, within: str, found: list[tuple[int, str]], length: int = 100) -> dict[str, tuple[Any, Any]]:
    """Key and value nodes of a mapping by name, of which `length` characters count; what is there twice is told."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for key, value in node.value:
        name = str(key.value)[:length] if not isinstance(key.value, list) else "?"
        if name in pairs:
            found.append((_line(key), f"`{within}{name[:100]}` stands in line {_line(pairs[name][0])} already."))
        else:
            pairs[name] = key, value
    return pairs


def _plain(node: Any) -> Any:
    """The value of a node that is a scalar or a list of scalars; what is neither as an empty one of its kind, which no
    field takes."""
    if isinstance(node, yaml.SequenceNode):
        return [_scalar(part) for part in node.value]
    return _scalar(node)


def _scalar(node: Any) -> Any:
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

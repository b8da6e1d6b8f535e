"""What may stand in the registry: every rule of a `ModelSpec`, and of all of them together. Pure.

    REST, command line, models.yaml ──▶ read_spec: names, types ──▶ check: values, clashes ──▶ KV `registry`

All that is wrong is told, not only the first of it: each problem names the field and is one sentence.
"""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from shared import sparse_attention
from shared.config import seconds_of
from shared.data_types import BLOCK_DTYPES, WEIGHT_DTYPES
from shared.messages.registry import MAX_ALIASES, MAX_MODELS, ModelSettings, ModelSpec
from shared.models import HUB, REASONING_PARSERS, TOOL_PARSERS

MAX_NAME = 200  # characters of a model's name, of an alias, and of a revision
MAX_SOURCE = 4096
MAX_REPLICAS = 1024
MAX_IDLE = 366 * 86_400.0  # seconds
MAX_NUMBER = 1 << 62  # of a setting: what fits in a message
MAX_DRAFTS = 63
_LAYER = re.compile(rf"-?\d{{1,5}}\s*=\s*({'|'.join(BLOCK_DTYPES)})", re.ASCII)
_RANGES: dict[str, tuple[int, int]] = {
    "tp": (1, 64),
    "kv_memory": (0, MAX_NUMBER),
    "weights_memory": (0, MAX_NUMBER),
    "context_length": (0, MAX_NUMBER),
    "max_sequences": (1, MAX_NUMBER),
    "max_batch_tokens": (1, MAX_NUMBER),
    "max_waiting": (1, MAX_NUMBER),
    "max_adapters": (0, 4096),
    "max_adapter_rank": (1, 256),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_dtype": WEIGHT_DTYPES,
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
}

# Fields that people write; the others are kept by those who write the registry.
DECLARED = (
    *("name", "source", "revision", "settings", "least", "most", "pinned", "idle", "aliases"),
    "sparse_attention",
)
SETTINGS = tuple(field.name for field in msgspec.structs.fields(ModelSettings))
_TYPES = {field.name: field.type for field in msgspec.structs.fields(ModelSpec)}
_SETTING_TYPES = {field.name: field.type for field in msgspec.structs.fields(ModelSettings)}


class Problem(NamedTuple):
    """One thing that is wrong with a model's entry."""

    field: str  # such as `least` or `settings.tp`; empty: the entry as a whole
    text: str  # one sentence


class DeclaredAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, as people write it."""

    name: str
    model: str  # name of its base in the registry
    source: str  # directory of peft's files on the hosts, or hub name
    revision: str = ""  # of a hub name: branch, tag or commit; empty: the main branch


def check(spec: ModelSpec, others: Iterable[ModelSpec] = (), adapters: Collection[str] = ()) -> list[str]:
    """Everything that is wrong with a model that is to be written beside `others` (an earlier one of its own name is
    replaced) and adapters of those names; empty: nothing."""
    return [problem.text for problem in problems_of(spec, others, adapters)]


def problems_of(spec: ModelSpec, others: Iterable[ModelSpec] = (), adapters: Collection[str] = ()) -> list[Problem]:
    """As `check`, with the fields."""
    beside = [other for other in others if other.name != spec.name]
    found = [*_name_problems(spec), *_replica_problems(spec), *settings_problems(spec.settings)]
    if len(beside) >= MAX_MODELS:
        found.append(
            Problem("", f"The registry holds {MAX_MODELS} models at most; remove one before {spec.name} is added.")
        )
    return [*found, *_clashes(spec, beside, adapters)]


def settings_problems(settings: ModelSettings) -> list[Problem]:
    """Values that no executor would take."""
    found = []
    for name, value in msgspec.structs.asdict(settings).items():
        if value is not None and (wrong := _wrong_setting(name, value)):
            found.append(Problem(f"settings.{name}", f"The setting {name} cannot be {value!r}: {wrong}."))
    return found


def _wrong_setting(name: str, value: Any) -> str:
    """Empty: nothing is."""
    if name in _RANGES:
        low, high = _RANGES[name]
        if low <= value <= high:
            return ""
        return f"it must be {low} or more" if high == MAX_NUMBER and value < low else f"it must be {low} to {high}"
    if choices := _CHOICES.get(name):
        return "" if value in choices else f"it must be one of {', '.join(choices)}{_meant(value, choices)}"
    if name == "speculation":
        number = value.isascii() and value.isdecimal() and len(value) < 4 and int(value) <= MAX_DRAFTS
        return "" if value in ("auto", "off") or number else f"it must be auto, off or a number from 0 to {MAX_DRAFTS}"
    if name == "draft_model":
        fits = len(value) <= MAX_SOURCE and value.isprintable() and value == value.strip()
        return "" if fits or not value else f"it must name a model in at most {MAX_SOURCE} printable characters"
    if name == "kv_dtype_layers":
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if all(_LAYER.fullmatch(part) for part in parts):
            return ""
        return f"it must be a list of LAYER={'|'.join(BLOCK_DTYPES)} with commas, such as 0=bf16,-1=bf16"
    return ""


def _name_problems(spec: ModelSpec) -> Iterable[Problem]:
    if wrong := wrong_name(spec.name):
        yield Problem("name", f"A model cannot be called {_short(spec.name)}: {wrong}.")
    yield from _source_problems(
        spec.name, spec.source, spec.revision, "a directory, a GGUF file, a built-in name or a hub name"
    )
    if len(spec.aliases) > MAX_ALIASES:
        yield Problem("aliases", f"{_short(spec.name)} has {len(spec.aliases)} aliases, and may have {MAX_ALIASES}.")
    for alias in spec.aliases:
        if wrong := wrong_name(alias):
            yield Problem("aliases", f"A model cannot have the alias {_short(alias)}: {wrong}.")


def _source_problems(name: str, source: str, revision: str, kinds: str) -> Iterable[Problem]:
    if not source.strip() or len(source) > MAX_SOURCE or not source.isprintable():
        yield Problem(
            "source", f"The source of {_short(name)} is {kinds}, of at most {MAX_SOURCE} printable characters."
        )
    if not revision:
        return
    if len(revision) > MAX_NAME or not re.fullmatch(r"[\w./+-]+", revision, re.ASCII):
        yield Problem("revision", f"The revision {_short(revision)} is no branch, tag or commit of a hub repository.")
    elif not of_hub(source):
        yield Problem(
            "revision",
            f"A revision goes with a hub name (ORGANISATION/NAME), and the source of {_short(name)} is "
            f"{_short(source)}.",
        )


def adapter_problems(adapter: DeclaredAdapter, models: Iterable[ModelSpec]) -> list[Problem]:
    """Everything that is wrong with an adapter that is to be beside these models, its own base among them."""
    found: list[Problem] = []
    if wrong := wrong_name(adapter.name):
        found.append(Problem("name", f"An adapter cannot be called {_short(adapter.name)}: {wrong}."))
    kinds = "a directory or a hub name"
    found += _source_problems(adapter.name, adapter.source, adapter.revision, kinds)
    for spec in models:
        if adapter.name == spec.name or adapter.name in spec.aliases:
            what = "the model" if adapter.name == spec.name else "an alias of the model"
            found.append(
                Problem("name", f"The name {_short(adapter.name)} is taken by {what} {spec.name}; choose another.")
            )
        if spec.name == adapter.model and spec.settings.max_adapters == 0:
            found.append(
                Problem("", f"The model {spec.name} takes no adapters: its setting max_adapters is 0; raise it.")
            )
    return found


def other_base(named: str, model: str, spec: ModelSpec | None) -> str:
    """Where an adapter says that it was trained for another model than the one that it is registered for: that, in
    words; empty: it does not. `named`: what its configuration has as the base's name or path. Names are compared by
    their last part, since the same model lies under many roofs and in many quantizations."""
    ours = [_kernel(one) for one in (model, spec.source if spec else "") if one]
    theirs = _kernel(named)
    if not theirs or any(theirs in one or one in theirs for one in ours if one):
        return ""
    return (
        f"its configuration says that it was trained for {named}, and it is registered for {model}; its quality "
        "depends on how alike the two are"
    )


def _kernel(name: str) -> str:
    """`hf://org/Some-Model-GGUF:Q4_K_M` and `/models/some_model` are `somemodel`."""
    last = name.rstrip("/").rpartition("/")[2].partition(":")[0].casefold()
    bare = re.sub(r"(\.gguf|[-_.](gguf|gptq|awq|fp8|bf16|int4|int8|4bit|8bit|bnb))+$", "", last)
    return "".join(character for character in bare if character.isalnum())


def wrong_name(name: str) -> str:
    """Why nothing may be called that; empty: it may."""
    if not name:
        return "a name has at least one character"
    if len(name) > MAX_NAME:
        return f"a name has at most {MAX_NAME} characters"
    if not name.isprintable() or name != name.strip():
        return "a name has printable characters alone, and no spaces at its ends"
    return ""


def of_hub(source: str) -> bool:
    """Whether the source reads as `org/name`, with or without `hf://` and a quantization."""
    if source.startswith(HUB):
        return True
    is_file = source.endswith(".gguf") and ":" not in source
    return "/" in source and not source.startswith(("/", ".", "~")) and not is_file


def as_of_hub(source: str) -> str:
    """A source as nobody takes it for a path: what reads as a hub name is one, whatever directory a process runs in."""
    return f"{HUB}{source}" if of_hub(source) and not source.startswith(HUB) else source


def _replica_problems(spec: ModelSpec) -> Iterable[Problem]:
    name = _short(spec.name)
    if not 0 <= spec.least <= MAX_REPLICAS:
        yield Problem("least", f"The least replicas of {name} are 0 to {MAX_REPLICAS}, not {spec.least}.")
    if not 1 <= spec.most <= MAX_REPLICAS:
        yield Problem("most", f"The most replicas of {name} are 1 to {MAX_REPLICAS}, not {spec.most}.")
    elif spec.least > spec.most:
        yield Problem(
            "least",
            f"{name} wants {spec.least} replicas at least and {spec.most} at most; raise the one or lower the other.",
        )
    if not (math.isfinite(spec.idle) and 0 <= spec.idle <= MAX_IDLE):
        yield Problem("idle", f"The idle time of {name} is 0 to {MAX_IDLE:.0f} seconds (366 days), not {spec.idle:g}.")
    if spec.pinned and spec.action == "unload":
        yield Problem("pinned", f"{name} is both pinned and to be unloaded; unpin it first, or leave it loaded.")


def _clashes(spec: ModelSpec, beside: list[ModelSpec], adapters: Collection[str]) -> Iterable[Problem]:
    """Names that clients could not tell apart."""
    names = {other.name: f"the model {other.name}" for other in beside}
    for other in beside:
        names |= {alias: f"an alias of the model {other.name}" for alias in other.aliases if alias not in names}
    names = {adapter: f"the adapter {adapter}" for adapter in adapters} | names
    if spec.name in names:
        yield Problem("name", f"The name {_short(spec.name)} is taken by {names[spec.name]}; choose another.")
    seen = {spec.name}
    for alias in spec.aliases:
        if alias in seen:
            what = "its own name" if alias == spec.name else "named twice"
            yield Problem("aliases", f"The alias {_short(alias)} of {_short(spec.name)} is {what}; remove it.")
        elif alias in names:
            yield Problem(
                "aliases",
                f"The alias {_short(alias)} of {_short(spec.name)} is taken by {names[alias]}; choose another.",
            )
        seen.add(alias)


def check_all(
    specs: Sequence[ModelSpec], beside: Iterable[ModelSpec] = (), adapters: Collection[str] = ()
) -> list[str]:
    """Everything that is wrong with models that are to be written together, beside others and adapters that stay."""
    stay = list(beside)
    found: list[str] = []
    for position, spec in enumerate(specs):
        found += check(spec, [*stay, *specs[:position]], adapters)
        if any(earlier.name == spec.name for earlier in specs[:position]):
            found.append(f"The model {_short(spec.name)} is declared twice.")
    return found


def read_spec(fields: Mapping[Any, Any], *, base: ModelSpec | None = None) -> tuple[ModelSpec | None, list[Problem]]:
    """The model that these fields of a JSON or YAML object declare, or None and all that is wrong with their names and
    types; the values are for `check`.

    `base`: what fields that are not given are taken from (settings one by one); without it `source` is the name where
    it is left out, and `most` no less than `least`. An idle time may be a text, such as `10m`.
    """
    spec, found = read_partly(fields, base=base)
    return (None if found else spec), found


def read_partly(fields: Mapping[Any, Any], *, base: ModelSpec | None = None) -> tuple[ModelSpec | None, list[Problem]]:
    """As `read_spec`, with what could be read though there are problems, to look for more of them; None: no name."""
    found: list[Problem] = []
    values: dict[str, Any] = {}
    for key, value in fields.items():
        if key not in DECLARED:
            found.append(unknown_field("", key, DECLARED))
        elif key == "settings":
            values[key], wrong = _read_settings(value, base.settings if base else ModelSettings())
            found += wrong
        else:
            _convert(key, _seconds(value) if key == "idle" else value, _TYPES[key], values, found)
    if "pinned" in values:
        values["pinned_by_request"] = False  # from now on the pin is theirs who have declared it
    if base is not None:
        return msgspec.structs.replace(base, **values), found
    if "name" not in fields:
        found.append(Problem("", "A model has a `name`, and this one has none."))
    if "name" not in values:
        return None, found
    if "source" not in fields:
        values["source"] = values["name"]
    values.setdefault("source", "?")
    values.setdefault("most", max(1, values.get("least", 0)))
    return ModelSpec(**values), found


def _read_settings(value: Any, base: ModelSettings) -> tuple[ModelSettings, list[Problem]]:
    if not isinstance(value, Mapping):
        return base, [Problem("settings", f"`settings` is a mapping of names and values, not {_told(value)}.")]
    found: list[Problem] = []
    values: dict[str, Any] = {}
    for key, one in value.items():
        if key in _SETTING_TYPES:
            _convert(key, one, _SETTING_TYPES[key], values, found, "settings.")
        else:
            found.append(unknown_field("settings.", key, SETTINGS))
    return msgspec.structs.replace(base, **values), found


def _convert(key: str, value: Any, kind: Any, values: dict[str, Any], found: list[Problem], within: str = "") -> None:
    try:
        values[key] = sparse_attention.read(value) if key == "sparse_attention" else msgspec.convert(value, kind)
    except sparse_attention.WrongChoice as error:
        path = f"{key}.{error.field}" if error.field else key
        found.append(Problem(path, f"Invalid `{path}`: {error}."))
    except msgspec.ValidationError:
        found.append(Problem(f"{within}{key}", f"`{within}{key}` is {_wanted(kind)}, not {_told(value)}."))


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        return 0.0 if value.strip() in ("0", "0s") else seconds_of(value) or value
    return value


def _wanted(kind: Any) -> str:
    """A type in words."""
    choices = [choice for part in (get_args(kind) or (kind,)) for choice in get_args(part) if isinstance(choice, str)]
    if choices:
        return f"one of {', '.join(choices)}"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number of seconds, or a time such as 10m",
        str: "text",
    }
    for part, words in names.items():
        if kind is part or (part in get_args(kind) and kind != list[str]):
            return words
    return "a list of texts"


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, str | bytes):
        return _short(str(value))
    return f"{str(value).lower() if isinstance(value, bool) else value} (text stands in quotes)"


def unknown_field(within: str, key: object, known: Collection[str]) -> Problem:
    name = str(key)
    return Problem(
        f"{within}{name}",
        f"There is no `{within}{name[:80]}`{_meant(name, known) or '; there are: ' + ', '.join(known)}.",
    )


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names that may be meant."""
    lowered = {one.lower(): one for one in known}
    return [lowered[one] for one in difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.6)]


def _meant(name: str, known: Iterable[str]) -> str:
    found = nearest(name, known, 1)
    return f"; {found[0]} may be meant" if found else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= MAX_NAME else f"{text[:60]}...")

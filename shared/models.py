"""What the command line and executors agree on about models: names in the model cache, which one fills and the other
reads, and of the parsers that an operator can choose (the gateway has the parsers themselves)."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from shared.errors import ModelLoadError

# Key of a model's config.json that says what `--weight-dtype auto` means for it: `bf16`, its codes are unpacked; left
# out, they are kept. The model store writes it for built-in models.
WEIGHT_DTYPE = "weight_dtype"

# How a model writes tool calls; `auto`: as its chat template shows, `none`: tools are refused. Some names are
# vLLM's for what another name means too.
ToolParser = Literal[
    "auto",
    "none",
    "apertus",
    "cohere_command3",
    "cohere_command4",
    "deepseek",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "ernie45",
    "functiongemma",
    "gemma4",
    "glm4",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "hy_v3",
    "internlm",
    "jamba",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minimax",
    "minimax_m2",
    "mistral",
    "nemotron_json",
    "nemotron_v3",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "step3",
    "step3p5",
    "xlam",
]

# How a model marks its reasoning; `auto`: as its chat template shows, `none` (vLLM's `identity`): it is part of the
# answer.
ReasoningParser = Literal[
    "auto",
    "none",
    "apertus",
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "holo2",
    "hunyuan_a13b",
    "hy_v3",
    "identity",
    "kimi_k2",
    "longcat",
    "mimo",
    "minimax_m2",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
    "step3",
    "step3p5",
    "think",
]

TOOL_PARSERS: tuple[str, ...] = get_args(ToolParser)
REASONING_PARSERS: tuple[str, ...] = get_args(ReasoningParser)


_SAMPLE_BYTES = 1 << 20
# What the directory holds; earlier versions unpacked the weights into it, or took the tokenizer of another file.
_FORM = b"linked, of the file alone"
GGUF = "GGUF"  # what a model's card calls the form of such files (`ModelCard.weights`)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Names of GGUF files that belong to a model.
_NO_MODEL = re.compile(r"(mmproj|imatrix)|.*[-._](mmproj|imatrix)\b", re.IGNORECASE)
_LISTED = 30  # models that an error names, at most
HUB = "hf://"
_PATHS = ("/", "./", "../", "~")
_LINK = re.compile(r"model(-\d{5}-of-\d{5})?\.gguf")


def path_of(name: str) -> Path | None:
    """The path that a model's name is; None: it is a name. One that does not begin as a path is one for command lines
    alone (`here`): of a name of the hub a service would else take a directory that lies in its own."""
    return Path(name).expanduser() if name in (".", "..") or name.startswith(_PATHS) else None


def here(name: str) -> str:
    """A model's name as a command line means it: what exists from there as its absolute path, which services in other
    directories understand; other names as they are."""
    try:
        path = Path(name).expanduser()
        return str(path.absolute()) if name and path.exists() else name
    except (OSError, RuntimeError):  # too long for a path, or of no user
        return name


def pulled_name(name: str) -> str:
    """The directory's name for a model with the (hub) name `name`."""
    return name.removeprefix(HUB).replace("/", "--")


def hub_name(name: str) -> tuple[str, str]:
    """(repository, quantization) of a hub name: `org/name`, `org/name:Q4_K_M`, `hf://` before either; the second is
    empty where the repository is a model directory."""
    repository, _, quantization = name.removeprefix(HUB).partition(":")
    return repository, quantization


def choose_gguf(files: Iterable[str], repository: str, quantization: str) -> list[str]:
    """Those of a repository's `files` that hold the model in `quantization`, which ends a file's name or is it.

    Raises `ModelLoadError`, with what there is, where no model or more than one has it, or a part is missing.
    """
    models = _models_among(files)
    wanted = quantization.lower().removesuffix(".gguf")
    found = [stem for stem in models if stem.lower().rpartition("/")[2] == wanted]
    if not found:
        found = [stem for stem in models if re.search(rf"(^|[-._]){re.escape(wanted)}$", stem.lower())]
        dynamic = [stem for stem in found if stem.lower().endswith(f"-ud-{wanted}")]
        found = [stem for stem in found if stem not in dynamic] or dynamic
    if len(found) == 1:
        held = models[found[0]]
        wholes = [part for part in gguf_parts(held[0]) if part not in held]
        if not wholes:
            return [str(part) for part in gguf_parts(held[0])]
        raise ModelLoadError(f"The repository {repository} lacks {wholes[0]}, a part of {found[0]}; choose another.")
    listed = ", ".join(list(found or models)[:_LISTED]) or "no GGUF files"
    kind = f"several models as {quantization}" if found else f"no model as {quantization}"
    raise ModelLoadError(
        f"The repository {repository} holds {kind}; there are: {listed}. Name one, by its quantization or whole."
    )


def _models_among(files: Iterable[str]) -> dict[str, list[Path]]:
    """The GGUF files of each model, by what their names begin with."""
    models: dict[str, list[Path]] = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix == ".gguf" and not _NO_MODEL.match(path.name):
            models.setdefault(str(path.with_name(gguf_name(path))), []).append(path)
    return models


def file_of(name: str) -> str:
    """The path of the GGUF file where the model `name` is a directory that holds one as it was fetched, without a
    config.json; else `name`. Raises `ModelLoadError` where it holds several models."""
    directory = path_of(name)
    if directory is None or not directory.is_dir() or (directory / "config.json").exists():
        return name
    models = _models_among(str(file) for file in directory.glob("*.gguf"))
    if len(models) > 1:
        listed = ", ".join(held[0].name for held in [*models.values()][:_LISTED])
        raise ModelLoadError(f"The directory {directory} holds {len(models)} models ({listed}); name one of its files.")
    return next((str(held[0]) for held in models.values()), name)


def gguf_name(path: Path) -> str:
    """The name of the model that the GGUF file `path` is, or is a part of."""
    split = _SPLIT.fullmatch(path.name)
    return split["stem"] if split else path.stem


def gguf_parts(path: Path) -> list[Path]:
    """The files of the model that `path` is, or is one of: `NAME-00001-of-00003.gguf` and so on, in order."""
    named = _SPLIT.fullmatch(path.name)
    if named is None:
        return [path]
    count = named["count"]
    return [path.with_name(f"{named['stem']}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)] or [
        path
    ]


def converted_name(gguf: Path) -> str:
    """The directory's name for what a GGUF file is served from, the same wherever the file lies.

    Made from its size, beginning and end, and those of the files beside it that are the same model's. Raises
    `ModelLoadError`.
    """
    digest = hashlib.sha256(_FORM)
    parts = gguf_parts(gguf)
    for part in parts:
        try:
            size = part.stat().st_size
            with part.open("rb") as stream:
                digest.update(str(size).encode() + stream.read(_SAMPLE_BYTES))
                stream.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(stream.read())
        except FileNotFoundError:
            beside = f", and that all {len(parts)} files of the model are in one directory" if len(parts) > 1 else ""
            raise ModelLoadError(f"The GGUF file {part} does not exist; check the path{beside}.") from None
        except OSError as error:
            raise ModelLoadError(f"The file {part} cannot be read ({error.strerror}); check the path.") from None
    return f"{gguf.stem}-{digest.hexdigest()[:12]}"


def linked_gguf(directory: Path) -> list[Path]:
    """The links to GGUF files in a model's directory that is served from them, in order."""
    return sorted(path for path in directory.glob("model*.gguf") if _LINK.fullmatch(path.name))


def link_gguf(directory: Path, gguf: Path) -> None:
    """Has `directory` lead to `gguf`, and to the files beside it that are the same model's. Raises `OSError`."""
    for part in gguf_parts(gguf.absolute()):
        named = _SPLIT.fullmatch(part.name)
        ending = f"-{named['number']}-of-{named['count']}" if named else ""
        link = directory / f"model{ending}.gguf"
        made = link.with_name(f".{link.name}.{os.getpid()}")
        made.unlink(missing_ok=True)
        made.symlink_to(part)
        made.replace(link)


def relink_gguf(directory: Path, gguf: Path) -> None:
    """The same, where a link of `directory` leads nowhere: the file has been moved. Raises `OSError`."""
    if any(not link.exists() for link in linked_gguf(directory)):
        link_gguf(directory, gguf)

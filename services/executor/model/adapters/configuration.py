"""What an adapter's `adapter_config.json` says, as peft writes it, and what of that is served.

    y = W x + scale * B (A x)      scale: lora_alpha / r, or lora_alpha / sqrt(r) of rank-stabilized LoRA

Refused by name is what would make the sum another one: DoRA, trained biases, other weights saved beside the factors,
initialisations that change the base's own weights.
Sources: Hu et al., "LoRA", https://arxiv.org/abs/2106.09685; Kalajdzievski, "rsLoRA", https://arxiv.org/abs/2312.03732;
Liu et al., "DoRA", https://arxiv.org/abs/2402.09353; peft, `LoraConfig`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelLoadError, reason_of

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256  # of any adapter; `--max-adapter-rank` may allow less
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 1024
_MAX_WILDCARDS = 2  # of one pattern: matching takes time by the length of a name to this power
_MAX_TARGETS = 4096  # names of modules that `target_modules` lists

# Keys of the configuration that are refused where they are set, and what they stand for.
_REFUSED = {
    "use_dora": "DoRA, which scales by the norms of merged weights",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "modules_to_save": "modules saved whole (modules_to_save)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "layer_replication": "replicated layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "routing between adapters (Arrow)",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's layers",
}
# Initialisations after which the base has other weights than its checkpoint.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TOKEN = re.compile(r"\.\*|\\d\+|\[\^\.\][*+]|\\\.|[\w.\-]")


@dataclass(frozen=True)
class AdapterConfig:
    """The meaning of an `adapter_config.json`."""

    rank: int
    alpha: float
    rank_stabilized: bool
    rank_pattern: Mapping[str, int]  # by patterns of module names, instead of `rank`
    alpha_pattern: Mapping[str, float]
    base: str  # what the adapter's author called its base; empty: unknown

    def rank_of(self, module: str) -> int:
        """Of `module`, by its full name."""
        return next((rank for key, rank in self.rank_pattern.items() if _matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the factors of `module` is multiplied by."""
        alphas = (alpha for key, alpha in self.alpha_pattern.items() if _matches(key, module))
        rank = self.rank_of(module)
        return next(alphas, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_config(directory: Path) -> AdapterConfig:
    """The configuration of the adapter in `directory`. Raises `ModelLoadError`: one sentence."""
    path = directory / CONFIG_FILE
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ModelLoadError(f"The adapter's {path} is larger than {_MAX_CONFIG_BYTES >> 20} MiB.")
        described = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(
            f"The directory {directory} has no {CONFIG_FILE}, so it is not an adapter; give one made by peft's "
            "save_pretrained, or a hub name."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"The adapter's {path} cannot be read ({reason_of(error)}).") from error
    if not isinstance(described, dict):
        raise ModelLoadError(f"The adapter's {path} is not a JSON object.")
    return _Reader(path, described).config()


class _Reader:
    def __init__(self, path: Path, described: dict[str, Any]) -> None:
        self._path, self._described = path, described

    def config(self) -> AdapterConfig:
        self._refuse_others()
        rank = self._rank("r", self._described.get("r"))
        base = self._described.get("base_model_name_or_path")
        return AdapterConfig(
            rank=rank,
            alpha=self._number("lora_alpha", self._described.get("lora_alpha", 8)),
            rank_stabilized=self._flag("use_rslora"),
            rank_pattern={
                key: self._rank(f"rank_pattern of {key}", value)
                for key, value in self._patterns("rank_pattern").items()
            },
            alpha_pattern={
                key: self._number(f"alpha_pattern of {key}", value)
                for key, value in self._patterns("alpha_pattern").items()
            },
            base=base if isinstance(base, str) else "",
        )

    def _refuse_others(self) -> None:
        kind = self._described.get("peft_type")
        if kind != "LORA":
            raise self._wrong(f"is of peft_type {kind!r}, and only LORA is supported")
        for key, meaning in _REFUSED.items():
            if self._described.get(key):
                raise self._wrong(f"uses {meaning}, which is not supported; train the adapter without")
        bias = self._described.get("bias", "none")
        if bias != "none":
            raise self._wrong(f"has trained biases (bias {bias!r}), which are not served; train with bias none")
        start = self._described.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGES_BASE):
            raise self._wrong(
                f"was initialised by {start}, which changes the base's weights; convert it to a plain LoRA "
                "(path_initial_model_for_weight_conversion of peft)"
            )
        targets = self._described.get("target_modules")
        if isinstance(targets, list) and len(targets) > _MAX_TARGETS:
            raise self._wrong(f"lists {len(targets)} target_modules, and {_MAX_TARGETS} are read at most")

    def _flag(self, name: str) -> bool:
        value = self._described.get(name)
        if value not in (None, True, False):
            raise self._wrong(f"has {name} {value!r}, which is neither true nor false")
        return bool(value)

    def _rank(self, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
            raise self._wrong(f"has {name} {value!r}, and ranks from 1 to {MAX_RANK} are served")
        return value

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(f"has {name} {value!r}, which is not a number")
        return float(value)

    def _patterns(self, name: str) -> dict[str, Any]:
        value = self._described.get(name) or {}
        if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
            raise self._wrong(f"has a {name} that is no object of up to {_MAX_PATTERNS} patterns")
        for pattern in value:
            if _as_regex(pattern) is None:
                raise self._wrong(
                    f"has the pattern {pattern!r} in {name}, and names, alone or with up to {_MAX_WILDCARDS} of "
                    r"'.*', '\d+' and '[^.]*', are read"
                )
        return value

    def _wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"The adapter's {self._path} {what}.")


def _matches(pattern: str, module: str) -> bool:
    """As peft has it: `pattern` is the whole name, or what follows one of its dots."""
    if pattern == module or module.endswith(f".{pattern}"):
        return True
    regex = _as_regex(pattern)
    return regex is not None and regex.fullmatch(module) is not None


def _as_regex(pattern: str) -> re.Pattern[str] | None:
    """None where it is more than names and a few wildcards: what a stranger sends must not take time without end."""
    body = pattern.removeprefix("^").removesuffix("$")
    tokens = _TOKEN.findall(body)
    wild = [token for token in tokens if token[-1] in "*+"]
    if "".join(tokens) != body or len(wild) > _MAX_WILDCARDS or len(pattern) > 256:
        return None
    free = "" if pattern.startswith("^") or body.startswith(".*") else r"(?:.*\.)?"
    return re.compile(free + body)

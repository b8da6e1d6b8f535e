"""Random LoRA adapters as peft saves them, and what a model merged with one computes."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from services.executor.model.adapters.targets import AdapterTarget, whole_targets
from services.executor.model.loading.loader import load_config
from tests.unit.executor.model.tiny import auto_class


def base_of(directory: Path) -> Any:
    """The model in `directory`, as transformers loads it."""
    return auto_class(load_config(directory)).from_pretrained(str(directory), dtype=torch.float32).eval()


def targets_in(directory: Path) -> list[AdapterTarget]:
    return whole_targets(load_config(directory))


def save_adapter(base: Any, directory: Path, targets: list[AdapterTarget], rank: int, **settings: Any) -> Any:
    """Saves an adapter of `rank` for all `targets` of `base` in `directory`; the model with it merged."""
    config = LoraConfig(
        r=rank,
        lora_alpha=rank * 1.5,
        target_modules=[target.name for target in targets if not target.experts],
        target_parameters=[target.name for target in targets if target.experts] or None,
        **settings,
    )
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft calls is deprecated in transformers
        return _saved(base, directory, config)


def _saved(base: Any, directory: Path, config: LoraConfig) -> Any:
    adapted = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * (0.1 if "lora_A" in name else 0.05))
    adapted.save_pretrained(str(directory))
    return adapted.merge_and_unload()

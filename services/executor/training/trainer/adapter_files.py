"""What a job makes: a directory as peft writes it, and the table of its steps.

    adapter_config.json          peft's `LoraConfig`
    adapter_model.safetensors    base_model.model.<target>.lora_A.weight [rank, in], ....lora_B.weight [out, rank], fp32
    CSV of steps                 the columns of OpenAI's result files first, then ours

The digest is that of adapters which are loaded by hand (`model.adapters.files`), so that equal adapters are one.
Sources: https://huggingface.co/docs/peft, `LoraConfig`; https://platform.openai.com/docs/guides/fine-tuning.
"""

import csv
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from services.executor.model.adapters.configuration import CONFIG_FILE, MAX_RANK
from services.executor.model.adapters.files import MAX_BYTES, PREFIX, WEIGHTS_FILE, AdapterInfo, inspect_for
from services.executor.model.adapters.targets import AdapterTarget
from services.executor.training.trainer.state import no_room
from shared.errors import ConfigurationError
from shared.messages.training import Hyperparameters, TrainingJob, TrainingMetrics

# Column -> field of `TrainingMetrics`. How long a step took is none of them: the file is the same after any death.
_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_accuracy",
    "train_reward_margin": "margin",
    "valid_reward_margin": "valid_margin",
    "learning_rate": "learning_rate",
    "grad_norm": "grad_norm",
    "tokens": "tokens",
}


def check_size(factors: Mapping[str, Tensor]) -> None:
    """Before the first step. Raises `ConfigurationError` where no executor would load what the job makes."""
    size = sum(factor.nbytes for factor in factors.values())
    if size > MAX_BYTES:
        raise ConfigurationError(
            f"The adapter would have {size:,} bytes, and {MAX_BYTES:,} are served at most; create the job with a "
            "smaller rank or fewer targets."
        )


def write_adapter(
    directory: Path, factors: Mapping[str, Tensor], hyperparameters: Hyperparameters, base: str
) -> AdapterInfo:
    """Makes `directory`, whole or not at all. `factors`: by `<target>/a` [rank, in] and `<target>/b` [out, rank],
    float32; `base`: how a reader finds the model. Raises `StorageFull`, and `ModelLoadError` where the factors are
    none that are served."""
    targets = sorted({name.rpartition("/")[0] for name in factors})
    tensors = {
        f"{PREFIX}{target}.lora_{letter.upper()}.weight": factors[f"{target}/{letter}"].detach().cpu().contiguous()
        for target in targets
        for letter in "ab"
    }
    unfinished = directory.with_name(f".{directory.name}.part")
    try:
        unfinished.mkdir(exist_ok=True)
        config = msgspec.json.format(msgspec.json.encode(_config(targets, hyperparameters, base)))
        (unfinished / CONFIG_FILE).write_bytes(config)
        save_file(tensors, unfinished / WEIGHTS_FILE, {"format": "pt"})
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with (unfinished / name).open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(directory, ignore_errors=True)  # of an attempt that went on from before
        unfinished.replace(directory)
    except (OSError, SafetensorError) as error:
        raise no_room(directory, error) from None
    return inspect_for(directory, [_target(name, factors) for name in targets], MAX_RANK)


def _target(name: str, factors: Mapping[str, Tensor]) -> AdapterTarget:
    return AdapterTarget(name, factors[f"{name}/a"].shape[1], factors[f"{name}/b"].shape[0])


def _config(targets: Sequence[str], hyperparameters: Hyperparameters, base: str) -> dict[str, object]:
    """What peft's `LoraConfig` writes where it differs from peft's defaults, and what others read."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": hyperparameters.scale * hyperparameters.rank,
        "lora_dropout": hyperparameters.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": hyperparameters.rank,
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def base_name(job: TrainingJob) -> str:
    """Of the base, for whoever gets the adapter: its hub name, or else how the cluster calls it. A directory of a host
    is of no use to others."""
    source = job.base.source.partition(":")[0] if job.base is not None else ""  # without its quantization
    return source if source.count("/") == 1 and source[0] not in "/.~" else job.model


def write_metrics(path: Path, metrics: Sequence[TrainingMetrics]) -> None:
    """The table of all steps; a field that a step has not is empty. Raises `StorageFull`."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        with unfinished.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(_COLUMNS)
            rows.writerows([_cell(getattr(step, field)) for field in _COLUMNS.values()] for step in metrics)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise no_room(path, error) from None


def _cell(value: float | None) -> str:
    """A float as short as it can be read back; ordinary numbers are not told to the 17th digit."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.8g}"

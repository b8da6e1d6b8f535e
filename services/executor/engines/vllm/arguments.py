"""The arguments that vLLM is started with: ours, then the operator's, as vLLM spells them.

    --engine-args '--tensor-parallel-size 2 --kv-cache-dtype fp8'

What would take away what a group relies on is refused by name.
"""

import shlex
from itertools import pairwise
from pathlib import Path

from services.executor.core.settings import ExecutorSettings
from services.executor.model.catalogue import is_encoder
from services.executor.model.pooling import is_classifier
from services.executor.model.tokenizer_files import read_json
from shared.errors import ConfigurationError
from shared.models import linked_gguf

PROCESSOR = "ryzanstein_vllm.processor:KeyedSampling"

# What of vLLM's arguments is refused, and why: half a sentence behind "since".
REFUSED = {
    "--model": "the model is named with --model of Ryzanstein",
    "--tokenizer": "gateways have the model's own tokenizer",
    "--skip-tokenizer-init": "structured output needs the tokenizer",
    "--tokenizer-mode": "gateways have the model's own tokenizer",
    "--logits-processors": "tokens are chosen by a processor of Ryzanstein's, so that answers can be continued",
    "--logprobs-mode": "log probabilities are those of the model, before sampling parameters",
    "--speculative-config": "vLLM takes no logits processors beside speculative decoding",
    "-sc": "vLLM takes no logits processors beside speculative decoding",
    "--speculative-model": "vLLM takes no logits processors beside speculative decoding",
    "--disable-log-stats": "the steps that it counts are the sign that the engine is alive",
    "--task": "--runner pooling says the like, with --convert",
    "--headless": "the engine runs in the executor's own process group",
    "--generation-config": "gateways apply the model's generation_config.json",
    "--override-generation-config": "gateways apply the model's generation_config.json",
}
_LORA_RANKS = (8, 16, 32, 64, 128, 256)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def split_arguments(text: str) -> list[str]:
    """`--engine-args` as a shell would have it. Raises `ConfigurationError`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--engine-args cannot be read ({error}); quote it as for a shell.") from None


def vllm_arguments(settings: ExecutorSettings, directory: Path) -> list[str]:
    """For the model in `directory`. Raises `ConfigurationError`."""
    if linked_gguf(directory):
        raise ConfigurationError(
            f"{settings.model} has its weights in a GGUF file, which vLLM does not serve; make a directory with "
            "safetensors of it with `ryzanstein models convert`, and name that."
        )
    given = split_arguments(settings.engine_args)
    names = {one.partition("=")[0].replace("_", "-") for one in given if one.startswith("-")}
    for name in sorted(names & REFUSED.keys()):
        raise ConfigurationError(f"--engine-args has {name}, which cannot be set, since {REFUSED[name]}; leave it out.")
    own = ["--model", str(directory), "--generation-config", "vllm", *_runner(given, directory)]
    if settings.context_length:
        own += ["--max-model-len", str(settings.context_length)]
    if settings.dtype != "auto":
        own += ["--dtype", _DTYPES.get(settings.dtype, settings.dtype)]
    # The default is our own rings': vLLM computes 256 to 1024 sequences at a time by itself.
    if "max_sequences" in settings.model_fields_set and "--max-num-seqs" not in names:
        own += ["--max-num-seqs", str(settings.max_sequences)]
    if "--enable-lora" in names and "--max-lora-rank" not in names:
        own += ["--max-lora-rank", str(_lora_rank(settings.max_adapter_rank))]
    return [*own, *given]


def _runner(given: list[str], directory: Path) -> list[str]:
    """Tokens are chosen by our processor; vLLM takes none where it gives vectors or classes."""
    named = [one.partition("=")[2] or following for one, following in pairwise([*given, ""]) if one[:8] == "--runner"]
    if "pooling" in named:
        return []
    if not named and _pools(directory):
        return ["--runner", "pooling"]
    return ["--logits-processors", PROCESSOR]


def _pools(directory: Path) -> bool:
    """Whether vLLM gives vectors or classes of the model where nobody says what it is to do."""
    config = read_json(directory / "config.json")
    return is_encoder(config) or is_classifier(config) or (directory / "modules.json").is_file()


def _lora_rank(most: int) -> int:
    """The smallest that vLLM knows and `most` fits."""
    return next(rank for rank in _LORA_RANKS if rank >= most)

"""The body of POST /v1/fine_tuning/jobs: OpenAI's, and what LoRA has of its own. What is `auto` is chosen once the
examples are known. Pure."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.schemas import Metadata
from shared.limits import LORA_TARGET, LORA_TARGETS, TRAINING_SUFFIX
from shared.messages.training import Hyperparameters, Optimizer, Schedule, TrainingMethod

Auto = Literal["auto"]
MAX_SEED = 2_147_483_647
_SUFFIX = re.compile(r"^[A-Za-z0-9._-]+$")
# What OpenAI allows of the first two; a rank as executors serve it at most.
MAX_EPOCHS, MAX_BATCH_SIZE, MAX_RANK, MAX_REPLICAS = 50, 256, 256, 16


class SupervisedHyperparameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    n_epochs: Auto | Annotated[int, Meta(ge=1, le=MAX_EPOCHS)] | None = "auto"
    batch_size: Auto | Annotated[int, Meta(ge=1, le=MAX_BATCH_SIZE)] | None = "auto"
    learning_rate_multiplier: Auto | Annotated[float, Meta(gt=0, le=1000)] | None = "auto"


class DpoHyperparameters(SupervisedHyperparameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    beta: Auto | Annotated[float, Meta(gt=0, le=2)] | None = "auto"


class Supervised(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hyperparameters: SupervisedHyperparameters | None = None


class Dpo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hyperparameters: DpoHyperparameters | None = None


class Method(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: Dpo | None = None
    reinforcement: Any = None  # refused: there are no graders here


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An extension: of the adapter that is trained."""

    rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 16
    alpha: Annotated[float, Meta(gt=0, le=4096)] | None = None  # left out: twice the rank
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    # Last parts of the linears' names (`q_proj`); empty: all but the output layer.
    target_modules: Annotated[
        list[Annotated[str, LORA_TARGET.length(min_length=1, pattern="^[A-Za-z0-9_.]+$")]], LORA_TARGETS.length()
    ] = []


class FineTuningCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1)]
    training_file: Annotated[str, Meta(min_length=1)]
    validation_file: str | None = None
    method: Method | None = None  # left out: supervised
    # As `method.supervised.hyperparameters`; OpenAI's older form.
    hyperparameters: SupervisedHyperparameters | None = None
    # Stands in the model's name.
    suffix: (
        Annotated[str, TRAINING_SUFFIX.length(min_length=1, extra_json_schema={"pattern": _SUFFIX.pattern})] | None
    ) = None
    # The same job with the same seed makes the same adapter; left out: a random one.
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    metadata: Metadata | None = None
    # Refused but for an empty list: events and result files have the metrics.
    integrations: list[Any] | None = None
    lora: Lora | None = None
    # Of an example; 0: the model's context. An extension, as what follows.
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    truncate: bool = False  # whether longer examples are cut at their end; else they are a fault of the file
    schedule: Schedule = "cosine"
    warmup_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.03
    weight_decay: Annotated[float, Meta(ge=0, le=10)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    optimizer: Optimizer = "adamw"
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1  # hosts that train it side by side


# Its fields that a job keeps and shows by the same names.
SETTINGS = (
    "max_tokens", "truncate", "schedule", "warmup_ratio", "weight_decay", "max_grad_norm", "optimizer", "replicas"
)  # fmt: skip


def method_of(wanted: FineTuningCreate) -> TrainingMethod:
    """Raises `InvalidParameter` for what is not there."""
    method = wanted.method
    if wanted.integrations:
        raise InvalidParameter(
            "Integrations are not supported here: the events and the result files of a job have its metrics; leave "
            "'integrations' out.",
            param="integrations",
            reason="unsupported_parameter",
        )
    if method is None:
        return "supervised"
    if method.type == "reinforcement" or method.reinforcement is not None:
        raise InvalidParameter(
            "Reinforcement fine-tuning is not supported here; use the method 'supervised' or 'dpo'.",
            param="method.type" if method.type == "reinforcement" else "method.reinforcement",
            reason="unsupported_value",
        )
    other = "dpo" if method.type == "supervised" else "supervised"
    if getattr(method, other) is not None:
        raise InvalidParameter(
            f"The method is '{method.type}', and 'method.{other}' has settings of another one; leave one out.",
            param=f"method.{other}",
        )
    return method.type


def hyperparameters_of(wanted: FineTuningCreate) -> Hyperparameters:
    """As a job has them. Raises `InvalidParameter`."""
    method, given = method_of(wanted), _given(wanted)
    if wanted.suffix is not None and not _SUFFIX.fullmatch(wanted.suffix):
        raise InvalidParameter(
            f"Invalid suffix '{wanted.suffix}': it stands in the model's name and has letters without accents, digits, "
            "'.', '_' and '-' alone.",
            param="suffix",
        )
    lora = wanted.lora or Lora()
    if len(set(lora.target_modules)) < len(lora.target_modules):
        raise InvalidParameter("A name stands twice in 'lora.target_modules'.", param="lora.target_modules")
    beta = given.beta if method == "dpo" and isinstance(given, DpoHyperparameters) else None
    batch = int(_number(given.batch_size))
    if 0 < batch < wanted.replicas:
        raise InvalidParameter(
            f"{wanted.replicas} replicas cannot share a batch of {batch}; raise 'batch_size', or lower 'replicas'.",
            param="replicas",
        )
    return Hyperparameters(
        epochs=int(_number(given.n_epochs)),
        batch_size=batch,
        learning_rate_multiplier=_number(given.learning_rate_multiplier),
        beta=_number(beta),
        rank=lora.rank,
        alpha=lora.alpha or 0.0,
        dropout=lora.dropout,
        targets=lora.target_modules,
        **{name: getattr(wanted, name) for name in SETTINGS},
    )


def _given(wanted: FineTuningCreate) -> SupervisedHyperparameters:
    method = wanted.method
    part = None if method is None else method.supervised or method.dpo
    given = None if part is None else part.hyperparameters
    if given is not None and wanted.hyperparameters is not None:
        assert method is not None, "it has the hyperparameters"
        raise InvalidParameter(
            f"Hyperparameters stand in 'hyperparameters' and in 'method.{method.type}'; leave the former out.",
            param="hyperparameters",
        )
    return given or wanted.hyperparameters or SupervisedHyperparameters()


def _number(given: Auto | float | None) -> float:
    return 0.0 if given is None or given == "auto" else float(given)

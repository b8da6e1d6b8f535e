"""The optimizer of the factors: AdamW in fp32, or bitsandbytes' with moments in 8 bits.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr (m' / (sqrt(v') + eps) + weight_decay p)

Before that the gradients are scaled so that their norm over all factors is at most `max_grad_norm` (0: never).
Sources: Loshchilov & Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101; Dettmers et
al., "8-bit optimizers via block-wise quantization", https://arxiv.org/abs/2110.02861, and "QLoRA" (paged),
https://arxiv.org/abs/2305.14314.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.platforms.catalog import platform_of
from shared.errors import ConfigurationError, InternalError
from shared.messages.training import Hyperparameters, Optimizer

_BETAS, _EPS = (0.9, 0.999), 1e-8
_OF_BITSANDBYTES: dict[Optimizer, str] = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}


class FactorOptimizer:
    """Of named factors, in the order of their names."""

    def __init__(
        self,
        factors: Mapping[str, nn.Parameter],
        hyperparameters: Hyperparameters,
        device: torch.device,
        ranks: Collectives | None = None,
    ) -> None:
        """`ranks`: each has a part of the gradients. Raises `ConfigurationError` where there is no such optimizer on
        this host."""
        self._names = sorted(factors)
        self._factors = [factors[name] for name in self._names]
        self._most = hyperparameters.max_grad_norm
        self._optimizer = _made(self._factors, hyperparameters, device)
        self._ranks = ranks or SingleRank()

    def clip(self) -> Tensor:
        """Scales the gradients; returns their norm before that, float32 []."""
        return torch.nn.utils.clip_grad_norm_(self._factors, self._most or float("inf"), foreach=False)

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def clear(self) -> None:
        """Forgets the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Of all factors, of all ranks; zeros of one that the step did not reach. Once a step."""
        for factor in self._factors:
            part = torch.zeros_like(factor) if factor.grad is None else factor.grad
            factor.grad = self._ranks.all_reduce(part.contiguous())
        return [factor.grad for factor in self._factors if factor.grad is not None]

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer remembers: `<factor>/<what>`. Numbers become float64 []."""
        found: dict[str, Tensor] = {}
        for at, state in self._optimizer.state_dict()["state"].items():
            for what, value in state.items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                found[f"{self._names[at]}/{what}"] = tensor
        return found

    def restore(self, moments: Mapping[str, Tensor]) -> None:
        """What `moments` has given. Raises `InternalError` where that was of other factors."""
        at = {name: index for index, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for path, tensor in moments.items():
            name, _, what = path.rpartition("/")
            if name not in at:
                raise InternalError(f"The state has moments of {name}, which this job does not train.")
            number = tensor.dtype == torch.float64 and tensor.ndim == 0
            state.setdefault(at[name], {})[what] = int(tensor) if number else tensor
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})


def _made(factors: list[nn.Parameter], hyperparameters: Hyperparameters, device: torch.device) -> torch.optim.Optimizer:
    kind, on_host = hyperparameters.optimizer, platform_of(device).is_host
    options: dict[str, Any] = {"betas": _BETAS, "eps": _EPS, "weight_decay": hyperparameters.weight_decay}
    if kind == "adamw":
        return torch.optim.AdamW(factors, lr=0.0, foreach=not on_host, **options)
    if on_host:
        raise ConfigurationError(
            f"The optimizer {kind} needs a CUDA GPU, and this host trains on its CPUs; create the job with the "
            "optimizer adamw."
        )
    try:
        optim = importlib.import_module("bitsandbytes.optim")
    except ImportError:
        raise ConfigurationError(
            f"The optimizer {kind} needs the package bitsandbytes, which this host does not have; install "
            "ryzanstein[training] there, or create the job with the optimizer adamw."
        ) from None
    made: torch.optim.Optimizer = getattr(optim, _OF_BITSANDBYTES[kind])(factors, lr=0.0, **options)
    return made

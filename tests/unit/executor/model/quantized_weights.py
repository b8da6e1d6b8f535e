"""Random quantized weights of every form."""

import numpy as np
import torch
from torch import Tensor

from services.executor.model.quantized import QuantizedRows

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMS = ("plain", "offset", "zeros", "mins", "table", "supers", "super_mins")


def random_rows(
    form: str,
    outputs: int,
    columns: int,
    bits: int = 4,
    group: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float16,
    per: int = 2,
    ordered: bool = False,
) -> QuantizedRows:
    """A weight of one of `FORMS`, with values of about 1; `ordered`: its columns are permuted."""
    made = np.random.default_rng(seed)
    groups = columns // group

    def floats(*shape: int) -> Tensor:
        sign = made.choice([-1.0, 1.0], shape)
        return torch.tensor(made.uniform(0.5, 1.5, shape) * sign / (1 << (bits - 1))).to(dtype)

    def small(low: int, high: int, kind: type) -> Tensor:
        return torch.from_numpy(made.integers(low, high, (outputs, groups)).astype(kind))

    parts: dict[str, object] = {"scales": floats(outputs, groups)}
    if form == "offset":
        parts["offset"] = 1 << (bits - 1)
    elif form == "zeros":
        parts["zeros"] = small(0, 1 << bits, np.uint8)
    elif form == "mins":
        parts["mins"] = floats(outputs, groups)
    elif form == "table":
        parts["table"] = TABLE[:: 1 << (4 - bits)]
    elif form in ("supers", "super_mins"):
        parts["scales"] = small(-32, 32, np.int8) if form == "supers" else small(0, 64, np.uint8)
        parts |= {"supers": floats(outputs, groups // per) / 16, "per": per}
        if form == "supers":
            parts["offset"] = 1 << (bits - 1)
        else:
            parts |= {"mins": small(0, 64, np.uint8), "super_mins": floats(outputs, groups // per) / 16}
    if ordered:
        parts["permutation"] = torch.from_numpy(made.permutation(columns).astype(np.int32))
    codes = torch.from_numpy(made.integers(0, 1 << bits, (outputs, columns)).astype(np.uint8))
    return QuantizedRows(codes, bits, group, **parts)  # type: ignore[arg-type]

"""Triton's interpreter cuts float32 off to bf16; GPUs round to the nearest, ties to even, as tests of bits must."""

from typing import Any

import pytest
import torch


def round_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end. Does nothing where Triton is not, or compiles."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != language.float32 or dst_type.scalar != language.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(src.data.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast_impl)

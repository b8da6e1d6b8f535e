"""Triton binds arguments in a function that it writes for each kernel; names of its own in there are taken."""

import importlib
import pkgutil

import pytest

pytest.importorskip("triton")

from services.executor.gpu import kernels

# By `triton.runtime.jit.create_function_from_signature` and its globals: there `params` is a dict by the time that the
# kernel's own argument of that name is looked at.
TAKEN = {"params", "specialization", "options", "backend", "specialize_impl", "JITCallable"}


def test_no_kernel_has_an_argument_that_triton_would_lose() -> None:
    found = {
        f"{module.name}.{name}": value.arg_names
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if type(value).__module__.startswith("triton.") and hasattr(value, "arg_names")
    }
    assert len(found) > 20
    assert {name: TAKEN & set(names) for name, names in found.items() if TAKEN & set(names)} == {}

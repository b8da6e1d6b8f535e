"""The kernels between a decoder's products: norms, places, activations."""

from collections.abc import Iterator
from typing import Any

import triton

from benchmarks.on_gpu.compiled_kernels.hopper import Compiled, compile_kernel, pointers, with_types
from services.executor.triton_kernels import activations, fused, norms, rotary


def measure(kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int) -> Compiled:
    signature = with_types(kernel, types)
    assert {name for name, kind in signature.items() if kind == "constexpr"} == constants.keys()
    return compile_kernel("", kernel, signature, constants, pointers(signature) | {"width"}, warps)


def add_norm(width: int, dtype: str = "*bf16", **switches: Any) -> Compiled:
    types = dict.fromkeys(("x", "residual", "out"), dtype) | dict.fromkeys(("after", "weight"), "*fp32")
    types |= {"scale": "fp32", "eps": "fp32", "width": "i32"}
    constants = {"BLOCK": triton.next_power_of_2(width), **switches}
    return measure(norms.add_norm, types, constants, fused.norm_warps(constants["BLOCK"]))


def place(q_heads: int, kv_heads: int, width: int, half: int, normed: bool, dtype: str = "*bf16") -> Compiled:
    types = dict.fromkeys(("qkv", "query", "hot"), dtype) | {"slots": "*i32", "eps": "fp32"}
    types |= dict.fromkeys(("cosines", "sines"), "*fp32" if half else "*bf16")
    types |= dict.fromkeys(("query_norm", "key_norm"), "*fp32" if normed else "*bf16")
    block = triton.next_power_of_2(width)
    constants = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "SIZE": 16, "WIDTH": width, "HALF": half}
    constants |= {"BLOCK_H": fused.VALUES // block, "BLOCK_D": block, "NORMS": normed, "OFFSET": False}
    return measure(rotary.place, types, constants, 4)


def gated(gelu: bool) -> Compiled:
    types = {"x": "*bf16", "out": "*bf16", "width": "i32"}
    return measure(activations.gated, types, {"BLOCK": fused.VALUES, "GELU": gelu}, 4)


def kernels() -> Iterator[Compiled]:
    plain = {"ADD": True, "AFTER": False, "SCALED": False, "OFFSET": False}
    whole = {"ADD": True, "AFTER": True, "SCALED": True, "OFFSET": True}
    found = {
        "norm, 4096": add_norm(4096, **{**plain, "ADD": False}),
        "add and norm, 4096": add_norm(4096, **plain),
        "add and norm, 5120": add_norm(5120, **plain),
        "add and norm, 4096, fp32": add_norm(4096, "*fp32", **plain),
        "norm, add and norm, 8192": add_norm(8192, **whole),
        "norm, add and norm, 16384": add_norm(16384, **whole),
        "place, 32 and 8 heads": place(32, 8, 128, 64, normed=False),
        "place, norms": place(32, 8, 128, 64, normed=True),
        "place, norms, fp32": place(32, 8, 128, 64, normed=True, dtype="*fp32"),
        "place, heads of 256, norms": place(8, 4, 256, 128, normed=True),
        "place, heads of 96": place(32, 32, 96, 48, normed=False),
        "place, not turned": place(16, 4, 128, 0, normed=False),
        "silu": gated(gelu=False),
        "gelu": gated(gelu=True),
    }
    for name, compiled in found.items():
        yield compiled._replace(name=name)

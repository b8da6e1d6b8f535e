"""The machine: what its memory, its matrix units and its bus give, since everything else is held against that.

Copies are counted as what is read and what is written; matrix products as 2 operations for each multiplication that is
added. Products are of random numbers: of zeros they are faster, since less current flows.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.on_gpu.bench import BF16, COPY, FP8, Bench, data_sheet
from benchmarks.on_gpu.timing import took

GB, TERA = 1e9, 1e12


def run(bench: Bench) -> None:
    """Every rate on its own: one that this machine does not have leaves the others."""
    parts: tuple[Callable[[Bench], None], ...] = (_copy, _bf16, _fp8, _read, _to_device, _launch)
    for part in parts:
        try:
            part(bench)
        except Exception as error:
            name = part.__name__.lstrip("_")
            bench.failed(f"machine/{name}", name, error)


def _copy(bench: Bench) -> None:
    size = 1 << (20 if bench.tiny else 32)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    seconds = took(lambda: target.copy_(source), bench.device, 12).device
    what = "device to device copy, read and written"
    bench.measured(COPY, what, 2 * size / seconds / GB, "GB/s", _printed(bench, 0, GB))


def _read(bench: Bench) -> None:
    size = 1 << (18 if bench.tiny else 31)
    numbers = torch.ones(size, dtype=torch.bfloat16, device=bench.device)
    seconds = took(lambda: numbers.amax(), bench.device, 12).device
    bench.measured(
        "machine/read", "reading alone (a maximum)", 2 * size / seconds / GB, "GB/s", _printed(bench, 0, GB)
    )


def _bf16(bench: Bench) -> None:
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = took(lambda: a @ b, bench.device, 20).device
    what = f"bf16 matrix product, {size} x {size} x {size}"
    bench.measured(BF16, what, 2 * size**3 / seconds / TERA, "TFLOP/s", _printed(bench, 1, TERA))


def _fp8(bench: Bench) -> None:
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)
    right = b.t()  # column-major, as cuBLASLt wants it

    def product() -> Any:
        return torch._scaled_mm(  # noqa: SLF001  # no public name before torch 2.10
            a, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    seconds = took(product, bench.device, 20).device
    what = f"fp8 matrix product, {size} x {size} x {size}"
    bench.measured(FP8, what, 2 * size**3 / seconds / TERA, "TFLOP/s", _printed(bench, 2, TERA))


def _to_device(bench: Bench) -> None:
    pinned = bench.device.type == "cuda"
    size = 1 << (18 if bench.tiny else 30)
    source = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    seconds = took(lambda: target.copy_(source, non_blocking=True), bench.device, 6).device
    bench.measured("machine/to-device", "host to device copy, pinned", size / seconds / GB, "GB/s")


def _launch(bench: Bench) -> None:
    """What an eager kernel costs where it has nothing to do: the reason for graphs."""
    numbers = torch.zeros(1, device=bench.device)

    def many() -> None:
        for _ in range(1000):
            numbers.add_(1.0)

    wall = took(many, bench.device, 3, warm=1).wall
    bench.measured("machine/launch", "an eager kernel that does nothing", wall * 1e3, "us")


def _printed(bench: Bench, column: int, scale: float) -> float | None:
    """The data sheet's rate."""
    if bench.device.type != "cuda":
        return None
    found = data_sheet(torch.cuda.get_device_name(bench.device), column)
    return found / scale if found else None

"""Tensors that say they are on cuda:0, whose numbers lie in the host's memory, where only `call` finds them.

Every function of torch that is given one goes through `call`, which does what a GPU's would: it refuses operands of
the host, notes what waits for the device, hands out fresh memory that holds nothing of use, and, while a graph is
captured, remembers what to do again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.pretend_gpu.graphs import spoil
from tests.pretend_gpu.on_host import ON_HOST
from tests.pretend_gpu.streams import HOST

CUDA = torch.device("cuda", 0)
FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
ABOUT = {
    "shape", "dtype", "ndim", "layout", "is_leaf", "requires_grad", "grad", "grad_fn", "names", "is_sparse", "is_meta",
    "is_quantized", "is_nested", "itemsize", "nbytes", "_version", "retains_grad", "output_nr",
}  # fmt: skip
# Of these nothing is launched.
METADATA = {
    "size", "stride", "dim", "numel", "nelement", "is_contiguous", "element_size", "storage_offset", "data_ptr",
    "untyped_storage", "is_floating_point", "is_complex", "is_signed", "__len__", "is_inference", "is_same_size",
    "ndimension", "__hash__", "is_shared", "_is_view", "storage",
}  # fmt: skip
# Of these no memory is read, or only by a copy.
VIEWS = {
    "view", "reshape", "__getitem__", "unsqueeze", "squeeze", "transpose", "t", "permute", "flatten", "expand", "split",
    "unbind", "chunk", "narrow", "select", "view_as", "unflatten", "detach", "as_strided", "contiguous", "swapaxes",
    "movedim", "T", "mT", "data", "diagonal", "tensor_split", "unfold", "expand_as",
}  # fmt: skip
# What the host has of the device's numbers, or a shape that depends on them.
ANSWERS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose", "nonzero",
    "masked_select", "unique", "unique_consecutive", "__contains__", "argwhere", "bincount", "__format__",
}  # fmt: skip


class DeviceTensor(Tensor):
    held: Tensor  # its numbers, in the host's memory

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CUDA
        )
        made.held = held
        return made

    def record_stream(self, stream: object) -> None:  # type: ignore[override]
        """Nothing to do: no memory is handed out again here while a copy is under way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} has reached what only pretends to be on a GPU")


class Placing(TorchFunctionMode):
    """What is made on the device, or in pinned memory, is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, DeviceTensor) for one in _leaves(args, kwargs)):
            return call(func, args, kwargs)
        return place(func, args, kwargs)


def held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def call(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of what is on the device."""
    name = _name(func)
    if name == "__get__":
        return _attribute(func, args)
    if name == "requires_grad_":
        return args[0]
    if name in METADATA or (name == "type" and len(args) == 1 and not kwargs):
        return func(*tree_map(held, args), **tree_map(held, kwargs))
    if name == "__repr__":
        return f"{args[0].held!r} on cuda:0"
    if name == "numpy":
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host")
    if name in {"copy_", "to", "cpu", "cuda"}:
        return _move(func, name, args, kwargs)
    if name in ANSWERS or _by_mask(name, args):
        HOST.wait_for_stream(name)
        if name not in {"nonzero", "masked_select", "unique", "__getitem__", "argwhere"}:
            return func(*tree_map(held, args), **tree_map(held, kwargs))
    _refuse_the_host_s(name, args, kwargs)
    return launch(name, func, args, kwargs)


def launch(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Does it, and remembers it where a graph is captured; results keep who they are."""
    kwargs, to_host = _without_device(kwargs)
    given = [one for one in _leaves(args, kwargs) if isinstance(one, DeviceTensor)]
    inner_args, inner_kwargs = tree_map(held, args), tree_map(held, kwargs)
    func = ON_HOST.get(name, func)

    def again() -> list[Tensor]:
        made = _new(func(*inner_args, **inner_kwargs), given)
        return [spoil(one) for one in made] if name in FRESH else made

    if to_host:
        return func(*inner_args, **inner_kwargs)
    HOST.stream.given += 1
    _check_uses(name, args, kwargs)
    out = func(*inner_args, **inner_kwargs)
    made = _new(out, given)
    for one in made:
        HOST.forget(one)
        if name in FRESH:
            spoil(one)
        HOST.use(one, name, writes=True)
    if HOST.recording is not None:
        HOST.recording.add(again, made)
    known = {id(one.held): one for one in given}
    return tree_map(lambda one: known.get(id(one), DeviceTensor(one)) if type(one) is Tensor else one, out)


def place(func: Any, args: Any, kwargs: Any) -> Any:
    """`func` of nothing that is on the device, but which may make something there."""
    name = _name(func)
    if name in {"to", "cuda"} and args and isinstance(args[0], Tensor):
        return _to_device(func, name, args, kwargs)
    if name == "is_pinned":
        return HOST.is_pinned(args[0])
    pinned = kwargs.get("pin_memory", False)
    if name == "pin_memory":
        return HOST.pin(args[0].clone())
    if not is_cuda(kwargs.get("device")):
        made = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory" or not pinned})
        return HOST.pin(made) if pinned else made
    if name in {"tensor", "as_tensor", "asarray"}:
        HOST.wait_for_stream(f"torch.{name} of the host's numbers")
    return launch(name, func, args, kwargs)


def _to_device(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A copy of the host's, or not."""
    device, dtype, non_blocking, _ = _parse(name, args, kwargs)
    if not is_cuda(device):
        return func(*args, **kwargs)
    source = args[0]
    if type(source) is not Tensor:
        source = source.detach().as_subclass(Tensor)
    if dtype is not None and dtype != source.dtype:
        HOST.wait_for_stream("a copy to the device that casts")
        return DeviceTensor(source.to(dtype, copy=True))
    _copy_begins(source, non_blocking)
    made = DeviceTensor(source.clone())
    HOST.forget(made.held)
    if HOST.recording is not None:
        HOST.recording.add(lambda: [source], [made.held])
    return made


def _copy_begins(source: Tensor, non_blocking: bool) -> None:
    if HOST.is_pinned(source) and non_blocking:
        HOST.from_pinned(source)
    else:
        HOST.wait_for_stream("a copy from memory that is not pinned, or that is waited for")


def _move(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "copy_":
        return _copy(args, kwargs)
    device, dtype, _, _ = _parse(name, args, kwargs)
    if device is None or is_cuda(device):
        if dtype is None or (dtype == args[0].dtype and not kwargs.get("copy")):
            return args[0]
        return launch("to", lambda one: one.to(dtype), (args[0],), {})
    # Also where it is said not to block.
    HOST.wait_for_stream("a copy to memory that is not pinned")
    found = args[0].held.clone()
    return found if dtype is None else found.to(dtype)


def _copy(args: Any, kwargs: Any) -> Any:
    target, source, *rest = args
    non_blocking = rest[0] if rest else kwargs.get("non_blocking", False)
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        return launch("copy_", Tensor.copy_, (target, source), {})
    if isinstance(target, DeviceTensor):
        same = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
        _copy_begins(source, non_blocking and same)
        return launch("copy_", lambda one: one.copy_(source), (target,), {})
    if not (non_blocking and HOST.is_pinned(target) and source.dtype == target.dtype):
        HOST.wait_for_stream("a copy to memory that is not pinned, or that is waited for")
        return target.copy_(source.held)
    HOST.use(source.held, "a copy to the host", writes=False)
    if HOST.recording is not None:
        HOST.recording.add(lambda: HOST.to_pinned(target, source.held) or [], [])
    else:
        HOST.to_pinned(target, source.held)
    return target


def _attribute(func: Any, args: Any) -> Any:
    name, tensor = func.__self__.__name__, args[0]
    if name == "device":
        return CUDA
    if name in {"is_cuda", "is_cpu"}:
        return name == "is_cuda"
    if name in ABOUT:
        return func(tensor.held)
    return launch(name, lambda one: getattr(one, name), (tensor,), {})  # T, mT, data, real


def _parse(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, bool, Any]:
    if name == "cpu":
        return torch.device("cpu"), None, False, None
    if name == "cuda":
        return CUDA, None, kwargs.get("non_blocking", False), None
    if len(args) > 1 and isinstance(args[1], Tensor):
        return args[1].device, args[1].dtype, kwargs.get("non_blocking", False), None
    rest = {key: value for key, value in kwargs.items() if key != "copy"}
    found: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args[1:], **rest)
    return found


def _by_mask(name: str, args: Any) -> bool:
    """Whether it is indexed by truth values, of which there are so many as the device knows."""
    if name not in {"__getitem__", "__setitem__", "index_put_"}:
        return False
    index = args[1] if isinstance(args[1], tuple | list) else (args[1],)
    masks = [one for one in index if isinstance(one, Tensor) and one.dtype in {torch.bool, torch.uint8}]
    scalar = name == "__setitem__" and not isinstance(args[2], Tensor)
    return bool(masks) and not scalar


def _refuse_the_host_s(name: str, args: Any, kwargs: Any) -> None:
    others = [one for one in _leaves(args, kwargs) if isinstance(one, Tensor) and not isinstance(one, DeviceTensor)]
    if name in {"__getitem__", "__setitem__"}:
        if any(one.dim() for one in others):
            HOST.wait_for_stream(f"{name} with a tensor of the host")
        return
    if any(one.dim() for one in others):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({name})"
        )


def _check_uses(name: str, args: Any, kwargs: Any) -> None:
    """That no other stream is at what this reads and writes."""
    written = [one for one in _leaves((kwargs.get("out"),), {}) if isinstance(one, DeviceTensor)]
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    if in_place and isinstance(args[0], DeviceTensor):
        written.append(args[0])
    if name in VIEWS and not written:
        return
    for one in _leaves(args, kwargs):
        if isinstance(one, DeviceTensor):
            HOST.use(one.held, name, writes=any(one is other for other in written))


def _new(out: Any, given: list[DeviceTensor]) -> list[Tensor]:
    """What of `out` lies in memory of its own."""
    old = {one.held.untyped_storage().data_ptr() for one in given}
    found = [one for one in tree_flatten(out)[0] if isinstance(one, Tensor)]
    return [one for one in found if one.untyped_storage().data_ptr() not in old]


def _without_device(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(`kwargs` for the host, whether what is made is meant to be there)"""
    rest = {key: value for key, value in kwargs.items() if key not in {"device", "pin_memory"}}
    return rest, kwargs.get("device") is not None and not is_cuda(kwargs["device"])


def _leaves(args: Any, kwargs: Any) -> Iterator[Any]:
    for one in args:
        yield from _leaves(one, {}) if isinstance(one, tuple | list) else (one,)
    for one in kwargs.values():
        yield from _leaves(one, {}) if isinstance(one, tuple | list) else (one,)


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))

"""Every byte at its place, whatever the pieces, however late the device is."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.loading import streaming
from services.executor.model.loading.composition import Composition, concatenated
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.loading.reading import Read, ReadMeter, stream_all
from services.executor.model.loading.streaming import boxes
from services.executor.model.loading.weight_files import WeightFiles
from services.executor.model.parallel.layers import LinearShard
from services.executor.model.weight_formats import Quantized, quantize
from services.executor.platforms.base import Carrier, Fence, Target
from services.executor.platforms.cpu import HostCarrier
from services.executor.platforms.cuda import CudaCarrier
from shared.errors import ModelLoadError
from tests.unit.executor.model.tiny import make_model

CPU = torch.device("cpu")


class LateCarrier:
    """A device that does what it was given only once it is waited for."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Target, Tensor]] = []
        self._done = 0

    def buffer(self, size: int) -> Tensor:
        return torch.full((size,), 0x5A, dtype=torch.uint8)

    def send(self, target: Target, staged: Tensor) -> Fence:
        self._waiting.append((target, staged))
        sent = len(self._waiting)

        def wait() -> None:
            # In order: what was sent before has arrived too.
            for each, content in self._waiting[self._done : sent]:
                each(content)
            self._done = max(self._done, sent)

        return wait


def stored(directory: Path) -> dict[str, Tensor]:
    tensors = {
        "bf16": torch.randn(37, 24).bfloat16(),
        "float": torch.randn(41, 24),
        "whole": torch.arange(100, dtype=torch.int64),
        "flags": torch.arange(9) % 2 == 0,
        "deep": torch.randn(3, 5, 40).bfloat16(),
        "one": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, directory / "model.safetensors")
    return tensors


def read(
    directory: Path,
    reads: Callable[[dict[str, Composition]], Sequence[Read]],
    make: Callable[[], Carrier],
    lanes: int = 3,
) -> tuple[list[Tensor | Quantized], list[tuple[int, int]]]:
    reports: list[tuple[int, int]] = []
    with WeightFiles(directory) as files:
        whole = {name: Composition.whole(name, shape) for name, shape in files.shapes.items()}
        asked = reads(whole)
        meter = ReadMeter(lambda done, total: reports.append((done, total)), sum(one.nbytes for one in asked))
        made = stream_all(asked, files, CPU, meter, make, lanes)
        meter.finish()
    return made, reports


@pytest.mark.parametrize("make", [HostCarrier, LateCarrier])
@pytest.mark.parametrize("piece", [8, 50, 200, 1 << 20])
def test_every_byte_arrives(
    tmp_path: Path, make: Callable[[], Carrier], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PIECE", piece)
    tensors = stored(tmp_path)
    halves = [ShardRange(3, 5), ShardRange(7, 9)]

    def reads(whole: dict[str, Composition]) -> list[Read]:
        return [
            *(Read(whole[name], tensor.dtype) for name, tensor in tensors.items()),
            Read(whole["float"], torch.bfloat16),
            Read(whole["bf16"].selected(1, halves), torch.float32),
            Read(whole["bf16"].transposed(0, 1).selected(0, halves), torch.bfloat16),
            Read(concatenated([whole["bf16"], whole["float"]], 0), torch.float64),
            Read(concatenated([whole["float"].selected(1, halves), whole["float"]], 1), torch.float32),
            Read(whole["deep"].selected(2, [ShardRange(10, 30)]), torch.bfloat16),
        ]

    made, reports = read(tmp_path, reads, make)
    columns = [3, 4, 7, 8]
    expected = [
        *tensors.values(),
        tensors["float"].bfloat16(),
        tensors["bf16"][:, columns].float(),
        tensors["bf16"].T[columns],
        torch.cat([tensors["bf16"].double(), tensors["float"].double()]),
        torch.cat([tensors["float"][:, columns], tensors["float"]], 1),
        tensors["deep"][:, :, 10:30],
    ]
    for found, right in zip(made, expected, strict=True):
        assert isinstance(found, Tensor)
        assert found.dtype == right.dtype
        assert torch.equal(found, right)
    total = sum(tensor.nbytes for tensor in expected)
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert reports == sorted(set(reports))


@pytest.mark.parametrize("codec", [FP8, INT8], ids=lambda codec: codec.name)
@pytest.mark.parametrize("piece", [300, 1 << 20])
def test_weights_are_quantised_as_they_come(
    tmp_path: Path, codec: Codec, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PIECE", piece)
    tensors = stored(tmp_path)

    def reads(whole: dict[str, Composition]) -> list[Read]:
        rows = [ShardRange(30, 37), ShardRange(2, 9)]
        return [
            Read(whole["float"], torch.bfloat16, codec),
            Read(concatenated([whole["bf16"], whole["float"]], 0).selected(0, rows), torch.bfloat16, codec),
            Read(whole["bf16"].selected(1, [ShardRange(8, 20)]), torch.bfloat16, codec),
            Read(concatenated([whole["bf16"], whole["bf16"]], 1), torch.bfloat16, codec),
        ]

    made, _ = read(tmp_path, reads, LateCarrier)
    both = torch.cat([tensors["bf16"], tensors["float"].bfloat16()])
    expected = [
        tensors["float"].bfloat16(),
        both[[*range(30, 37), *range(2, 9)]],
        tensors["bf16"][:, 8:20],
        torch.cat([tensors["bf16"], tensors["bf16"]], 1),
    ]
    for found, weight in zip(made, expected, strict=True):
        right = quantize(weight, codec)
        assert isinstance(found, Quantized)
        assert torch.equal(found.codes.view(torch.int8), right.codes.view(torch.int8))
        assert torch.equal(found.scales, right.scales)


def test_a_gpu_is_given_pieces_by_a_stream_of_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[object, ...]] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            done.append(("stream", device))

        def wait_stream(self, other: object) -> None:
            done.append(("after", other))

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Stream) -> None:
            done.append(("recorded", type(stream)))

        def synchronize(self) -> None:
            done.append(("waited",))

    @contextmanager
    def current(stream: Stream) -> Iterator[None]:
        done.append(("on", type(stream)))
        yield
        done.append(("off",))

    def noted(staged: Tensor) -> None:
        done.append(("taken", staged))

    device = torch.device("cuda", 3)
    for name, double in {"Stream": Stream, "Event": Event, "stream": current}.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    fence = CudaCarrier(device).send(noted, torch.empty(0))
    fence()
    assert [step[0] for step in done] == ["device", "stream", "after", "on", "taken", "recorded", "off", "waited"]
    assert done[:3] == [("device", device), ("stream", device), ("after", "default")]


def test_an_error_in_one_lane_ends_all_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE", 16)
    stored(tmp_path)
    sent = []
    others_may_go = threading.Event()

    class Failing(HostCarrier):
        def send(self, target: Target, staged: Tensor) -> Fence:
            sent.append(threading.get_ident())
            if len(set(sent)) == 1:
                others_may_go.wait(10)
            else:
                others_may_go.set()
                raise RuntimeError("the device is gone")
            return super().send(target, staged)

    with pytest.raises(RuntimeError, match="the device is gone"):
        read(tmp_path, lambda whole: [Read(whole["float"], torch.float32)], Failing, lanes=2)
    # The lane that was well has sent what it had, and at most the piece that it took meanwhile.
    assert len(sent) <= 3


def test_a_file_that_has_become_shorter_is_told(tmp_path: Path) -> None:
    stored(tmp_path)
    path = tmp_path / "model.safetensors"
    with WeightFiles(tmp_path) as files:
        view = files.tensor("whole")
        with path.open("r+b") as file:
            file.truncate(100)
        with pytest.raises(ModelLoadError, match=r"weights of whole cannot be read .* ends at byte"):
            files.copy("whole", view, torch.empty_like(view))


@pytest.mark.parametrize(("shape", "most"), [((), 1), ((0, 3), 4), ((7,), 8), ((3, 5, 40), 64), ((4, 6), 12)])
def test_boxes_cover_a_tensor_once(shape: tuple[int, ...], most: int) -> None:
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes(shape, 4, most):
        assert counts[box].numel() * 4 <= max(most, 4)
        counts[box] += 1
    assert bool((counts == 1).all())


def test_a_model_keeps_its_linear_layers_quantised(llama: Path) -> None:
    layout = ShardLayout.from_config(load_config(llama), 1, 0)
    load = [
        load_model(llama, torch.bfloat16, layout, SingleRank(), CPU, lambda *_: None, codec) for codec in (None, FP8)
    ]
    plain, coded = (dict(model.named_modules()) for model in load)
    quantised = {
        name
        for name, module in coded.items()
        if isinstance(module, LinearShard) and isinstance(module.stored, Quantized)
    }
    assert len(quantised) == 3 * 7
    assert not any("lm_head" in name for name in quantised)
    for name in quantised:
        expected = quantize(plain[name].weight, FP8)
        assert torch.equal(coded[name].stored.codes.view(torch.int8), expected.codes.view(torch.int8))
        assert coded[name].weight.numel() == 0
        coded[name].multiply_by(lambda x: x[:, :1])
        assert coded[name].multiply(torch.ones(2, 3, 5)).shape == (2, 3, 1)
    others = [name for name, module in plain.items() if getattr(module, "weight", None) is not None]
    for name in set(others) - quantised:
        assert torch.equal(coded[name].weight, plain[name].weight)


def test_linears_that_lie_the_other_way_are_quantised_too(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "gpt2", num_key_value_heads=9, head_dim=8)
    config = load_config(directory)
    layout = ShardLayout.from_config(config, 1, 0)
    plain, coded = (
        dict(load_model(directory, torch.bfloat16, layout, SingleRank(), CPU, lambda *_: None, codec).named_modules())
        for codec in (None, INT8)
    )
    quantised = [name for name, module in coded.items() if isinstance(getattr(module, "stored", None), Quantized)]
    assert len(quantised) == 4 * config.num_hidden_layers
    for name in quantised:
        assert torch.equal(coded[name].stored.codes, quantize(plain[name].weight, INT8).codes)

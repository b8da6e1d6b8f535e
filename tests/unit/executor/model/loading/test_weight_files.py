import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.executor.model.loading.weight_files import WeightFiles
from shared.errors import ModelLoadError


def refused(directory: Path, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as raised:
        WeightFiles(directory)
    message = str(raised.value)
    assert message.endswith(".")
    assert "\n" not in message


def write_raw(path: Path, header: object, data: bytes) -> None:
    """A safetensors file with any header."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_tensors_of_every_type_and_shape(tmp_path: Path, name: str) -> None:
    tensors = {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "cube": torch.randn(2, 3, 4)}
    if name.endswith(".bin"):
        tensors["strided"] = torch.randn(6, 4).T
        torch.save(tensors, tmp_path / name)
    else:
        save_file(tensors, tmp_path / name)
    with WeightFiles(tmp_path) as files:
        assert files.shapes == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            stored = files.tensor(key)
            assert stored.dtype == tensor.dtype
            assert stored.untyped_storage().tolist() == tensor.untyped_storage().tolist() or stored.numel() < 100
            assert torch.equal(stored.double(), tensor.double())
            files.release(key, stored)
            assert torch.equal(stored.double(), tensor.double()), "it comes back from the file"


def test_unaligned_tensors(tmp_path: Path) -> None:
    values = torch.randn(300)
    header = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [300], "data_offsets": [1, 1201]},
    }
    write_raw(tmp_path / "model.safetensors", header, b"\x07" + values.numpy().tobytes())
    with WeightFiles(tmp_path) as files:
        assert torch.equal(files.tensor("x").clone(), values)


def test_safetensors_cut_short_say_where(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(64), "b": torch.zeros(64)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    refused(tmp_path, "ends 100 bytes before the end of the tensor b")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}, "type 'F4', which is not read"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not agree with its bytes"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "does not agree with its bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "does not agree with its bytes"),
        ({"dtype": "F32", "shape": [1]}, "does not describe tensors"),
        ({"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}, "does not describe tensors"),
        ("F32", "does not describe tensors"),
    ],
)
def test_headers_that_lie(tmp_path: Path, entry: object, reason: str) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": entry}, bytes(4))
    refused(tmp_path, reason)


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


class Custom:
    pass


def test_pickles_with_code_are_refused_by_name(tmp_path: Path) -> None:
    for content, reason in (
        ({"a": Code()}, r"holds (posix|nt)\.system, which is code"),
        ({"a": Custom()}, r"holds .*Custom, which is code"),
        ({"state_dict": {"a": torch.zeros(1)}}, "something else than named tensors"),
        ([torch.zeros(1)], "something else than named tensors"),
    ):
        torch.save(content, tmp_path / "pytorch_model.bin")
        refused(tmp_path, reason)


def test_damaged_pickles(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    begin = whole.find(b"data.pkl") + 80
    for damaged, reason in (
        (whole[: len(whole) // 2], "damaged or was not fetched to its end"),
        (whole[:begin] + bytes(20) + whole[begin + 20 :], "damaged or was not fetched to its end"),
        (b"", "damaged or was not fetched to its end"),
        (b"\xff" * 100, "not in the zip format"),
    ):
        path.write_bytes(damaged)
        refused(tmp_path, reason)
    torch.save({"a": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    refused(tmp_path, "not in the zip format")


def test_pickles_in_several_files(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    torch.save({"a": torch.ones(3), "both": torch.zeros(1)}, tmp_path / "one.bin")
    torch.save({"b": torch.full((2,), 2.0), "both": torch.ones(1), "extra": torch.ones(1)}, tmp_path / "two.bin")
    index.write_text(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin", "both": "two.bin"}}))
    with WeightFiles(tmp_path) as files:
        assert set(files.shapes) == {"a", "b", "both", "extra"}
        assert files.tensor("both").item() == 1
    (tmp_path / "two.bin").unlink()
    refused(tmp_path, "two.bin is missing, though pytorch_model.bin.index.json names it")


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    torch.save({"a": Code()}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        assert files.tensor("a").tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}', "{}"]
)
def test_corrupt_indices(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "index.json cannot be read")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "folder"}}')
    (tmp_path / "folder").mkdir()
    refused(tmp_path, "folder cannot be read .*check its rights")

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.executor.model.loading import gguf_file
from services.executor.model.loading.gguf_file import GgufFile, open_parts
from shared.errors import ModelLoadError
from shared.models import gguf_parts
from tests.unit.executor.model.gguf_models import finish


def write(path: Path, name: str = "one", split: tuple[int, int] | None = None, tensors: int = 4) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "cé"])
    writer.add_array("llama.numbers", [1, 2, 3])
    writer.add_array("llama.many", list(range(12)))
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", tensors)
    values = np.arange(128, dtype=np.float32).reshape(2, 64)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor(f"{name}.norm", np.ones(5, np.float32))
    finish(writer)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as raised:
        GgufFile(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def header(*, tensors: int = 0, values: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_what_a_writer_wrote_is_read(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_LONGEST_ARRAY", 8)
    (tmp_path / "m.gguf").write_bytes(whole)
    file = GgufFile(tmp_path / "m.gguf")
    metadata = file.header.metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == 128
    assert metadata["llama.numbers"] == (1, 2, 3)
    assert "llama.many" not in metadata
    assert "tokenizer.ggml.tokens" not in metadata
    weight, norm = file.header.tensors
    assert (weight.name, weight.shape, weight.kind.name, norm.shape) == ("one.weight", (2, 64), "Q8_0", (5,))
    theirs = gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors[0].data
    assert np.array_equal(file.rows(weight).numpy(), theirs)


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    # What the writer fills up behind the last tensor is of no use.
    for length in range(len(whole) - 12):
        refused(tmp_path / "m.gguf", whole[:length])


@given(data=st.data())
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
def test_changed_files_are_read_or_refused_in_a_sentence(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(content) - 9))
        changed = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\xff\xff\xff\x7f"]))
        content[at : at + len(changed)] = changed
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except ModelLoadError as error:
        assert "\n" not in str(error)  # noqa: PT017  # most changes are not found
        return
    for found in file.header.tensors:
        assert file.rows(found).sum() >= 0  # within the file


@given(content=st.binary(max_size=300))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_behind_the_magic_are_refused_or_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + content)
    try:
        assert not GgufFile(path).header.tensors
    except ModelLoadError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a GGUF file"),
        (b"GGML", "not a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(values=1 << 60), "ends within its header"),
        (header(tensors=1 << 60), "ends within its header"),
        (header(values=1) + struct.pack("<Q", 1 << 63), "longer than 65535"),
        (header(values=1) + text(b"\xff"), "not UTF-8"),
        (header(values=1) + text(b"k") + struct.pack("<I", 13), "value of type 13"),
        (header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "value of type 9"),
        (header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 12, 1 << 62), "ends within its header"),
        (header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 62), "ends within its header"),
        (header(values=2) + (text(b"k") + struct.pack("<IB", 0, 1)) * 2, "says 'k' twice"),
        (header(values=1) + text(b"general.alignment") + struct.pack("<II", 4, 0), "alignment is 0"),
        (header(values=1) + text(b"general.alignment") + struct.pack("<II", 4, 48), "alignment is 48"),
        (header(values=1) + text(b"general.alignment") + struct.pack("<I", 8) + text(b"x"), "alignment is 'x'"),
        (header(tensors=1) + tensor(b"t", (), 0, 0), "has 0 dimensions"),
        (header(tensors=1) + tensor(b"t", (1,) * 5, 0, 0), "has 5 dimensions"),
        (header(tensors=1) + tensor(b"t", (1 << 63, 1 << 63), 0, 0), "has the shape"),
        (header(tensors=1) + tensor(b"t", (0,), 0, 0), "has the shape"),
        (header(tensors=1) + tensor(b"t", (1 << 40,), 0, 0), "before the end of the tensor t"),
        (header(tensors=1) + tensor(b"t", (8,), 0, 1 << 62), "before the end of the tensor t"),
        (header(tensors=1) + tensor(b"t", (8,), 0, 5), "not at a multiple of 32"),
        (header(tensors=1) + tensor(b"t", (40,), 8, 0), "not a whole number of blocks of type Q8_0"),
        (header(tensors=1) + tensor(b"t", (32,), 99, 0), "type 99"),
        (header(tensors=2) + tensor(b"t", (8,), 0, 0) + tensor(b"u", (8,), 0, 0) + bytes(99), "overlap"),
        (header(tensors=2) + tensor(b"t", (8,), 0, 0) + tensor(b"t", (8,), 0, 32) + bytes(99), "one name"),
    ],
)
def test_what_lies_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    assert reason in refused(tmp_path / "m.gguf", content)


def test_a_header_without_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_LONGEST_HEADER", 1000)
    content = header(values=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 500) + bytes(8 * 500)
    assert "longer than 1000 bytes" in refused(tmp_path / "m.gguf", content)


def test_files_of_one_model(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    paths = [write(tmp_path / name, f"t{number}", (number, 2)) for number, name in enumerate(names)]
    assert gguf_parts(paths[1]) == paths
    assert [file.path for file in open_parts(paths[0])] == paths
    assert gguf_parts(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002.gguf does not exist; .* all 2 files"):
        open_parts(paths[0])
    write(paths[1], "t0", (1, 2))
    with pytest.raises(ModelLoadError, match=r"hold a tensor t0\.weight"):
        open_parts(paths[0])
    write(paths[1], "t1", (1, 2), tensors=5)
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00002.gguf is of a model of 5 tensors, and .* there are 4"):
        open_parts(paths[0])
    write(paths[1], "t1", (0, 2))
    with pytest.raises(ModelLoadError, match="not number 2 of 2"):
        open_parts(paths[0])
    write(tmp_path / "alone.gguf", "t", (0, 2))
    with pytest.raises(ModelLoadError, match="not number 1 of 1"):
        open_parts(tmp_path / "alone.gguf")

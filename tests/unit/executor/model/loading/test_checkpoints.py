import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.executor.model.conversion.__main__ import main
from services.executor.model.loading import checkpoints
from services.executor.model.loading.checkpoints import convert_gguf, resolve_model
from services.executor.model.loading.gguf_metadata import positive
from shared.errors import ModelLoadError
from shared.model_store.locks import LOCKS
from shared.model_store.repository import MANIFEST
from shared.model_store.settings import Store
from tests.unit.executor.model.gguf_models import finish

HIDDEN, LAYERS, FEED, CONTEXT = 32, 2, 64, 256


def write_gguf(path: Path, **changes: object) -> Path:
    """A tiny Llama in Q8_0 with a byte-level tokenizer."""
    byte_tokens = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    byte_tokens += [chr(256 + extra) for extra in range(68)]
    tokens = ["<end>", "<start>", "<turn>", "12", "ab", *byte_tokens]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (2 + len(byte_tokens)))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    tensor("token_embd.weight", len(tokens), HIDDEN)
    tensor("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FEED, HIDDEN),
            "ffn_up": (FEED, HIDDEN),
            "ffn_down": (HIDDEN, FEED),
        }.items():
            tensor(f"blk.{layer}.{name}.weight", *shape)
    finish(writer)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def ignore(stage: str, done: int, total: int) -> None:
    return


def test_a_gguf_file_becomes_a_model_directory_once(file: Path, tmp_path: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    directory = resolve_model(str(file), Store.at(tmp_path), lambda *stage: stages.append(stage))
    assert stages[0] == ("header", 0, 3)
    assert stages[-1] == ("done", 3, 3)
    assert [*tmp_path.glob("[!.]*"), *tmp_path.glob(".*.partial")] == [directory]
    assert (directory / MANIFEST).is_file(), "it may be removed"
    assert (directory / "model.gguf").resolve() == file
    assert not [*directory.glob("*.safetensors")]
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert (directory / "chat_template.jinja").read_text().startswith("{% for m")
    assert json.loads((directory / "tokenizer_config.json").read_text())["model_max_length"] == CONTEXT
    # Digits stand alone in this tokenizer, whatever the merges say.
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("12ab").tokens == ["1", "2", "ab"]
    again: list[tuple[str, int, int]] = []
    assert resolve_model(str(file), Store.at(tmp_path), lambda *stage: again.append(stage)) == directory
    assert again == []


def test_a_directory_leads_to_the_file_wherever_it_is_moved(file: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(file.read_bytes())
    directory = resolve_model(str(moved), Store.at(tmp_path / "cache"), ignore)
    assert resolve_model(str(directory), Store.at(tmp_path / "cache"), ignore) == directory
    (tmp_path / "new").mkdir()
    newer = moved.rename(tmp_path / "new" / "moved.gguf")
    with pytest.raises(ModelLoadError, match=r"moved.gguf, which holds the weights .* no longer exists"):
        resolve_model(str(directory), Store.at(tmp_path / "cache"), ignore)
    assert resolve_model(str(newer), Store.at(tmp_path / "cache"), ignore) == directory
    assert (directory / "model.gguf").resolve() == newer


def test_a_conversion_imports_neither_torch_nor_transformers(file: Path, tmp_path: Path) -> None:
    """They take seconds, before the first byte of the weights."""
    code = (
        "import sys; from pathlib import Path; from services.executor.model.loading.checkpoints import convert_gguf;"
        "convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda *stage: None);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_interrupted_conversion_leaves_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_tokenizer_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(file, tmp_path / "out", ignore)
    assert list(tmp_path.iterdir()) == []


def test_two_conversions_at_once_agree(file: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("first")
    convert_gguf(file, tmp_path / "out", ignore)
    assert (tmp_path / "out" / "config.json").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_damaged_files(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    for content, reason in [
        (file.read_bytes()[:-2000], "before the end of the tensor"),
        (file.read_bytes()[:200], "ends within its header"),
        (b"not a model", "not a GGUF file"),
    ]:
        damaged.write_bytes(content)
        with pytest.raises(ModelLoadError, match=reason) as raised:
            resolve_model(str(damaged), Store.at(tmp_path / "cache"), ignore)
        assert "\n" not in str(raised.value)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [LOCKS]


def test_what_names_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "weights.bin").touch()
    for name, reason in [
        (str(tmp_path / "none.gguf"), "does not exist"),
        (str(tmp_path / "weights.bin"), "neither a model directory nor a .gguf"),
        (str(tmp_path / "none"), "does not exist"),
        ("no-such-owner/no-such-model", "is not in the cache .*HF_HUB_OFFLINE is set"),
    ]:
        with pytest.raises(ModelLoadError, match=reason):
            resolve_model(name, Store.at(tmp_path / "cache"), ignore)
    assert resolve_model(str(tmp_path), Store.at(tmp_path / "cache"), ignore) == tmp_path


def test_command_reports_stages_and_errors(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["directory", str(file), str(tmp_path / "out")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == [{"stage": "done", "done": 3, "total": 3}, {"result": {}}]
    assert main(["directory", str(file), str(tmp_path / "out")]) == 0
    (tmp_path / "file").touch()
    assert main(["directory", str(file), str(tmp_path / "file" / "out")]) == 1
    assert "cannot be read or written" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_command_fails_as_a_process(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "services.executor.model.conversion",
        "directory",
        str(tmp_path / "x.gguf"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ), check=False)
    assert done.returncode == 1
    assert "cannot be read" in json.loads(done.stdout)["error"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("directory", "before the end of the tensor"),
        ("inspect", "before the end of the tensor"),
        ("convert", "before the end of the tensor"),
        ("convert", "cut.gguf cannot be used: the architecture 'lxama' is not served"),
    ],
)
def test_a_file_that_will_not_do_is_refused_before_anything_is_imported(
    file: Path, tmp_path: Path, command: str, reason: str
) -> None:
    cut, whole = tmp_path / "cut.gguf", file.read_bytes()
    cut.write_bytes(whole.replace(b"llama", b"lxama") if "lxama" in reason else whole[:-2000])
    more = {"directory": [tmp_path / "out"], "convert": [tmp_path / "out", "--to", "safetensors"]}
    arguments = [command, str(cut), *map(str, more.get(command, []))]
    told = (
        "import sys; from services.executor.model.conversion.__main__ import main; "
        f"status = main({arguments!r}); print(status, *sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=100, check=True)
    first, last = done.stdout.splitlines()
    assert reason in json.loads(first)["error"]
    assert last == "1"


@pytest.mark.parametrize("value", [0, -1.0, 65, float("nan"), "64", [64]])
def test_what_cannot_be_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"has an invalid phi3\.rope\.dimension_count, "):
        positive({"phi3.rope.dimension_count": value}, "phi3.rope.dimension_count", 64)

"""A model is served with its own weights, tokenizer, template and sampling defaults, or refused by the name of what is
not there: tiny files, with tensors and metadata left out, doubled and misnamed."""

import json
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.executor.core.engine import EngineSpec
from services.executor.model.card import read_card
from services.executor.model.conversion.convert import convert
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.gguf_file import GgufFile
from services.executor.model.loading.gguf_metadata import check_described
from services.executor.model.loading.gguf_tokenizer import WHOLE
from shared.errors import ModelLoadError
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.gguf_parts import Key, Stored, parts_of, write_parts
from tests.unit.executor.model.loading.gguf_checks import load, values_of
from tests.unit.executor.model.loading.test_checkpoints import ignore, write_gguf
from tests.unit.executor.model.tiny import build, make_model

SAMPLING = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}
DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
# Keys without which a model has none of that; without others it is the same model, or refused.
MEANS_NONE = {"tokenizer.chat_template", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eot_token_id"} | {
    f"general.sampling.{name}" for name in SAMPLING
}


class Model(NamedTuple):
    """What is served of a file."""

    weights: dict[str, Tensor]
    texts: dict[str, str]


def served(file: Path) -> Model:
    directory = file.with_name("served")
    convert_gguf(file, directory, ignore)
    texts = {path.name: path.read_text() for path in directory.iterdir() if path.suffix in (".json", ".jinja")}
    return Model(values_of(load(directory, torch.float32)), texts)


def is_same(one: Model, other: Model, but: str = "") -> bool:
    weights = one.weights.keys() == other.weights.keys() and all(
        torch.equal(value, other.weights[name]) for name, value in one.weights.items()
    )
    return weights and (but in MEANS_NONE or one.texts == other.texts)


def number(value: float) -> bytes:
    if isinstance(value, int):
        return struct.pack("<Ii", gguf.GGUFValueType.INT32, value)
    return struct.pack("<If", gguf.GGUFValueType.FLOAT32, value)


class Whole(NamedTuple):
    keys: list[Key]
    tensors: list[Stored]
    model: Model


def whole_of(directory: Path) -> Whole:
    file = write_gguf(directory / "model.gguf")
    keys, tensors = parts_of(file)
    keys += [Key(f"general.sampling.{name}", number(value)) for name, value in SAMPLING.items()]
    return Whole(keys, tensors, served(write_parts(file, keys, tensors)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return whole_of(tmp_path_factory.mktemp("packed"))


def misnamed(name: str) -> str:
    return f"{name[:-3]}x{name[-2:]}"


CHANGES: dict[str, Callable[[Any, Any], list[Any]]] = {
    "left out": lambda part, other: [],
    "misnamed": lambda part, other: [part._replace(name=misnamed(part.name))],
    "doubled": lambda part, other: [part, part],
    "as another": lambda part, other: [part._replace(name=other.name)],
}


@given(data=st.data())
@settings(max_examples=20)
def test_a_file_is_its_own_model_or_refused_by_name(whole: Whole, data: st.DataObject) -> None:
    of_tensors = data.draw(st.booleans())
    parts: list[Any] = list(whole.tensors if of_tensors else whole.keys)
    at = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.sampled_from([part for part in parts if part is not parts[at]]))
    part = parts[at]
    parts[at : at + 1] = CHANGES[data.draw(st.sampled_from(sorted(CHANGES)))](part, other)
    with tempfile.TemporaryDirectory() as directory:
        changed = (whole.keys, parts) if of_tensors else (parts, whole.tensors)
        file = write_parts(Path(directory) / "model.gguf", *changed)
        found = outcome(file)
    if isinstance(found, Model):
        assert not of_tensors
        assert is_same(found, whole.model, but=part.name)
    else:
        assert "\n" not in found
        assert "above" not in found
        names = (part.name, other.name, misnamed(part.name), "model.", "does not say", "config.json")
        assert any(name in found for name in names), found


def test_the_end_of_a_turn_does_not_stand_for_that_of_a_text(whole: Whole, tmp_path: Path) -> None:
    keys = [key for key in whole.keys if key.name != "tokenizer.ggml.eos_token_id"]
    found = outcome(write_parts(tmp_path / "model.gguf", keys, whole.tensors))
    assert "tokenizer.ggml.eos_token_id" in str(found)


def outcome(file: Path) -> Model | str:
    """What is served, or the reason why nothing is."""
    try:
        return served(file)
    except ModelLoadError as error:
        return str(error)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain"), "qwen2", tie_word_embeddings=False)


@given(data=st.data())
@settings(max_examples=10)
def test_a_directory_is_its_own_model_or_refused_by_name(plain: Path, data: st.DataObject) -> None:
    tensors = load_file(str(plain / "model.safetensors"))
    name, other = data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=2, max_size=2, unique=True))
    change = data.draw(st.sampled_from(["left out", "misnamed", "as another"]))
    new = {"left out": None, "misnamed": f"{name[:-3]}x", "as another": other}[change]
    value = tensors.pop(name)
    if new is not None:
        tensors[new] = value
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory)
        for text in plain.glob("*.json"):
            (target / text.name).write_bytes(text.read_bytes())
        if data.draw(st.booleans()):
            save_file(tensors, str(target / "model.safetensors"))
        else:
            torch.save(tensors, target / "pytorch_model.bin")
        with pytest.raises(ModelLoadError) as raised:
            load(target, torch.float32)
        assert any(one in str(raised.value) for one in (name, other, new or name))
        with pytest.raises(ModelLoadError):
            convert(target, target / "out.gguf", "gguf", "bf16", ignore)


def test_a_tokenizer_beside_a_file_is_not_the_files(whole: Whole, tmp_path: Path) -> None:
    """Nor a template, nor what another model's generation_config.json recommends; converted neither."""
    file = write_parts(tmp_path / "model.gguf", whole.keys, whole.tensors)
    other = write_parts(
        tmp_path / "other.gguf", [key for key in whole.keys if key.name not in MEANS_NONE], whole.tensors
    )
    convert_gguf(other, tmp_path / "other", ignore)
    for text in (tmp_path / "other").glob("*.json"):
        (tmp_path / text.name).write_text(text.read_text().replace("<turn>", "<other>"))
    (tmp_path / "chat_template.jinja").write_text("another model's")
    assert is_same(served(file), whole.model)
    convert(file, tmp_path / "plain", "safetensors", "bf16", ignore)
    for name, text in whole.model.texts.items():
        if name != "config.json":
            assert (tmp_path / "plain" / name).read_text() == text, name


def test_sampling_goes_from_format_to_format(whole: Whole, tmp_path: Path) -> None:
    file = write_parts(tmp_path / "model.gguf", whole.keys, whole.tensors)
    convert(file, tmp_path / "plain", "safetensors", "bf16", ignore)
    convert(tmp_path / "plain", tmp_path / "again.gguf", "gguf", "bf16", ignore)
    convert_gguf(tmp_path / "again.gguf", tmp_path / "again", ignore)
    for directory in (file.with_name("plain"), tmp_path / "again"):
        spec = EngineSpec(num_blocks=1, block_size=16, vocab_size=261, context_length=256)
        card, _ = read_card(directory, "model", spec)
        assert card.defaults == DEFAULTS


def test_a_file_that_does_not_say_what_ends_a_text_is_asked_for_tokens_of_that_name(
    whole: Whole, tmp_path: Path
) -> None:
    keys = [
        key._replace(value=key.value.replace(b"<end>", b"<eos>"))
        for key in whole.keys
        if key.name not in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ]
    texts = served(write_parts(tmp_path / "model.gguf", keys, whole.tensors)).texts
    assert json.loads(texts["generation_config.json"])["eos_token_id"] == 0
    assert json.loads(texts["tokenizer_config.json"])["eos_token"] == "<eos>"


@pytest.mark.parametrize("width", ["feed_forward_length", "expert_feed_forward_length"])
def test_a_model_of_experts_alone_says_their_width(whole: Whole, tmp_path: Path, width: str) -> None:
    file = write_parts(tmp_path / "model.gguf", whole.keys, whole.tensors)
    opened = GgufFile(file)
    header = opened.header
    spans = {key for key in header.spans if key != "llama.feed_forward_length"}
    opened.header = replace(header, spans=dict.fromkeys([*spans, f"llama.{width}"], slice(0)))
    check_described([opened])
    opened.header = replace(header, spans=dict.fromkeys(spans, slice(0)))
    with pytest.raises(ModelLoadError, match=r"does not say llama\.feed_forward_length"):
        check_described([opened])


@pytest.mark.parametrize("value", [-1.0, float("nan"), 101.0])
def test_sampling_that_cannot_be_is_refused_by_its_key(whole: Whole, tmp_path: Path, value: float) -> None:
    keys = [key._replace(value=number(value)) if key.name == "general.sampling.temp" else key for key in whole.keys]
    with pytest.raises(ModelLoadError, match=r"has an invalid general\.sampling\.temp, "):
        served(write_parts(tmp_path / "model.gguf", keys, whole.tensors))


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("eos", "</s>", r"has an invalid tokenizer\.ggml\.eos_token_id, '</s>'"),
        ("eot", 9999, r"says that token 9999 ends an answer, of \d+ tokens"),
    ],
)
def test_ends_that_are_no_tokens_are_refused(
    whole: Whole, tmp_path: Path, name: str, value: str | int, sentence: str
) -> None:
    key = Key(f"tokenizer.ggml.{name}_token_id", text(value) if isinstance(value, str) else number(value))
    keys = [key if one.name == key.name else one for one in whole.keys]
    with pytest.raises(ModelLoadError, match=rf"model\.gguf {sentence}"):
        served(write_parts(tmp_path / "model.gguf", keys, whole.tensors))


def test_a_tokenizer_of_other_readers_is_looked_into(whole: Whole, tmp_path: Path) -> None:
    keys = [key for key in whole.keys if key.name != "tokenizer.ggml.pre"]  # which it says itself
    keys.append(Key(WHOLE, text("{}")))
    with pytest.raises(ModelLoadError, match=rf"The {WHOLE} of \S+model\.gguf does not say 'added_tokens'"):
        served(write_parts(tmp_path / "model.gguf", keys, whole.tensors))


def test_a_file_with_more_tokens_than_rows_is_refused(whole: Whole, tmp_path: Path) -> None:
    tensors = [
        one._replace(shape=(one.shape[0] - 1, one.shape[1])) if one.name == "token_embd.weight" else one
        for one in whole.tensors
    ]
    with pytest.raises(ModelLoadError, match=r"has \d+ tokens, and \d+ rows of token_embd\.weight for them"):
        served(write_parts(tmp_path / "model.gguf", whole.keys, tensors))


SCALED = {
    "linear": ({"rope.scaling.type": "linear"}, r"does not say llama\.rope\.scaling\.factor"),
    "untyped": ({"rope.scaling.factor": 4.0}, r"does not say llama\.rope\.scaling\.type"),
    "unknown": ({"rope.scaling.type": "other"}, r"rope\.scaling\.type 'other'"),
    "long": ({"rope.scaling.attn_factor": 1.1}, r"no tensor rope_factors_long\.weight"),
}


@pytest.mark.parametrize("case", SCALED)
def test_scaled_positions_that_are_half_said_are_refused(whole: Whole, tmp_path: Path, case: str) -> None:
    said, reason = SCALED[case]
    with pytest.raises(ModelLoadError, match=reason):
        served(write_parts(tmp_path / "model.gguf", [*whole.keys, *scaling(said)], whole.tensors))


def scaling(said: Mapping[str, str | float]) -> list[Key]:
    return [
        Key(f"llama.{name}", text(value) if isinstance(value, str) else number(value)) for name, value in said.items()
    ]


def text(value: str) -> bytes:
    return struct.pack("<IQ", gguf.GGUFValueType.STRING, len(value)) + value.encode()


def test_learned_buffers_are_not_made_up(tmp_path: Path) -> None:
    model = build("deepseek_v3", settings_of("deepseek_v3"))
    model.save_pretrained(str(tmp_path))
    tensors = load_file(str(tmp_path / "model.safetensors"))
    lost = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    del tensors[lost]
    save_file(tensors, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=f"have no tensor {re.escape(lost)}"):
        load(tmp_path, torch.float32)


def test_weights_that_are_tied_and_differ_are_refused(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(str(directory / "model.safetensors"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, str(directory / "model.safetensors"))
    load(directory, torch.float32)
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, str(directory / "model.safetensors"))
    with pytest.raises(ModelLoadError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight"):
        load(directory, torch.float32)


def test_tensors_that_stand_twice_are_named(plain: Path, tmp_path: Path) -> None:
    tensors = load_file(str(plain / "model.safetensors"))
    for file in plain.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = tmp_path / "model.safetensors"
    save_file({**tensors, "norm.weight": tensors["model.norm.weight"].clone()}, str(stored))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight and norm\.weight of the weights are both"):
        load(tmp_path, torch.float32)
    save_file(tensors, str(stored))
    stored.write_bytes(stored.read_bytes().replace(b"layers.1.mlp.up_proj", b"layers.0.mlp.up_proj"))
    with pytest.raises(ModelLoadError, match=r"it has model\.layers\.0\.mlp\.up_proj\.weight twice"):
        load(tmp_path, torch.float32)


def test_files_that_hold_the_same_tensors_are_refused(plain: Path, tmp_path: Path) -> None:
    """Unless the index says which is meant."""
    tensors = load_file(str(plain / "model.safetensors"))
    for file in plain.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    twice = {"model.norm.weight": 2 * tensors["model.norm.weight"]}
    save_file(tensors, str(tmp_path / "one.safetensors"))
    save_file({**twice, "lm_head.weight": tensors["lm_head.weight"]}, str(tmp_path / "two.safetensors"))
    places = dict.fromkeys(tensors, "one.safetensors") | {"lm_head.weight": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = values_of(load(tmp_path, torch.float32))
    assert torch.equal(found["model.norm.weight"], tensors["model.norm.weight"])
    del places["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelLoadError, match=r"Two weight files in .* hold model\.norm\.weight"):
        load(tmp_path, torch.float32)


def test_weights_that_overlap_are_refused(plain: Path, tmp_path: Path) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = tmp_path / "model.safetensors"
    content = stored.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    one, two = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    header[one]["data_offsets"] = header[two]["data_offsets"]
    changed = json.dumps(header).encode()
    stored.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    with pytest.raises(ModelLoadError, match=rf"the tensors {re.escape(one)} and {re.escape(two)} overlap"):
        load(tmp_path, torch.float32)

"""SentencePiece's tokenizers in GGUF files: what reads the file makes the same tokens of texts."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, trainers
from transformers.tokenization_utils_base import generate_merges

from services.executor.model.conversion.convert import convert
from services.executor.model.conversion.gguf_tokenizer import scores, space_prefix, vocabulary
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.pre_tokenizers import SPLIT_RULES
from shared.errors import ModelLoadError
from tests.unit.executor.model.conversion.conftest import PLAIN, TOKENIZER
from tests.unit.executor.model.tiny import make_model

SPACE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREPEND = {"type": "Prepend", "prepend": SPACE}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
# How texts are changed before they are merged, by the model type that has it so.
RULES: dict[str, dict[str, Any]] = {
    "llama": {"normalizer": None, "pre_tokenizer": METASPACE},
    "qwen2": {"normalizer": None, "pre_tokenizer": {**METASPACE, "prepend_scheme": "never"}},
    "phi3": {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, "pre_tokenizer": None},
    "gemma": {
        "normalizer": REPLACE,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    },
}
TEXTS = (
    "the cat sat on the mat, and the other cat",
    "a  b   c",
    "tab\tand\nnew line",
    "naïve Ω 12",
    "<s>the mat</s>",
    "the<plain>mat",
)


def sentencepiece(model_type: str) -> dict[str, Any]:
    """A tokenizer.json as transformers makes it of SentencePiece's."""
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [SPACE + text.replace(" ", SPACE) for text in TEXTS[:2]] * 3,
        trainers.BpeTrainer(vocab_size=90, show_progress=False),
    )
    learned = sorted(trained.get_vocab().items(), key=lambda one: one[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in learned)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, {piece: -index for piece, index in learned})
    added = [{"id": vocab[name], "content": name, "special": True, **PLAIN} for name in ("<unk>", "<s>", "</s>")]
    vocab["<plain>"] = len(vocab)
    added.append({"id": vocab["<plain>"], "content": "<plain>", "special": False, **PLAIN})
    begin, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": added,
        **RULES[model_type],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, text],
            "pair": [begin, text, begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [list(merge) for merge in merges],
        },
    }


def directory_with(tmp_path: Path, model_type: str) -> Path:
    tokenizer = sentencepiece(model_type)
    changes = {"vocab_size": len(tokenizer["model"]["vocab"]) + 2}
    directory = make_model(tmp_path / "tiny", model_type, **changes)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize("model_type", RULES)
def test_sentencepiece_is_the_same_after_gguf(tmp_path: Path, model_type: str) -> None:
    source = directory_with(tmp_path, model_type)
    convert(source, tmp_path / "model.gguf", "gguf", "bf16", lambda *stage: None)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back", lambda *stage: None)
    before, after = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (source, tmp_path / "back"))
    for text in TEXTS:
        assert before.encode(text).ids == after.encode(text).ids, text
        assert after.decode(after.encode(text).ids) == before.decode(before.encode(text).ids)


@pytest.mark.parametrize("name", ["smollm", "seed-coder", "qwen2", "llama-bpe", "gpt-4o", "tekken"])
def test_byte_level_tokenizers_split_text_as_before(tmp_path: Path, name: str) -> None:
    splitter = SPLIT_RULES[name].pre_tokenizer()
    source = make_model(tmp_path / "tiny", "seed_oss")
    (source / "tokenizer.json").write_text(json.dumps({**TOKENIZER, "pre_tokenizer": splitter}))
    convert(source, tmp_path / "model.gguf", "gguf", "bf16", lambda *stage: None)
    said = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields["tokenizer.ggml.pre"].contents()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "back", lambda *stage: None)
    found = json.loads((tmp_path / "back" / "tokenizer.json").read_text())["pre_tokenizer"]
    assert (said, found) == (name, splitter)


def test_what_llama_cpp_reads_of_sentencepiece(tmp_path: Path) -> None:
    source = directory_with(tmp_path, "gemma")
    convert(source, tmp_path / "model.gguf", "gguf", "bf16", lambda *stage: None)
    fields = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields
    said = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (said["model"], said["pre"], said["add_space_prefix"]) == ("llama", "default", False)
    assert (said["add_bos_token"], said["unknown_token_id"]) == (True, 0)
    assert said["token_type"][:4] == [2, 3, 3, 6]
    assert said["token_type"][-3:] == [4, 5, 5]
    held = dict(zip(said["tokens"], said["scores"], strict=True))
    merges = [tuple(merge.split(" ")) for merge in said["merges"]]
    made = [held["".join(merge)] for merge in merges]
    assert made == sorted(made, reverse=True)
    assert min(made) > held["<s>"]


@pytest.mark.parametrize("listed", [False, True])
def test_templates_stops_and_sampling_are_carried_both_ways(tmp_path: Path, listed: bool) -> None:
    source, templates = (
        directory_with(tmp_path, "llama"),
        {"default": "{{ messages }}", "tool_use": "{{ tools }}{{ messages }}"},
    )
    files = {"default": source / "chat_template.jinja", "tool_use": source / "additional_chat_templates/tool_use.jinja"}
    if listed:
        given = [{"name": name, "template": template} for name, template in templates.items()]
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    for name, file in files.items() if not listed else ():
        file.parent.mkdir(exist_ok=True)
        file.write_text(templates[name])
    said = {"eos_token_id": [2, 0, 1], "temperature": 0.25, "top_k": 20, "top_p": 0.5, "min_p": 0.125}
    (source / "generation_config.json").write_text(json.dumps(said))
    convert(source, tmp_path / "model.gguf", "gguf", "bf16", lambda *stage: None)
    convert(tmp_path / "model.gguf", tmp_path / "back", "safetensors", "bf16", lambda *stage: None)
    back = tmp_path / "back"
    assert {name: (back / file.relative_to(source)).read_text() for name, file in files.items()} == templates
    assert json.loads((back / "generation_config.json").read_text()).items() >= said.items()
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 0, 1, 3]}')
    with pytest.raises(ModelLoadError, match="end with any of 4 tokens, and a GGUF file has places for 3"):
        convert(source, tmp_path / "other.gguf", "gguf", "bf16", lambda *stage: None)


def test_the_first_merge_of_a_piece_counts() -> None:
    found = scores(["a", "b", "ab", "abb"], [("a", "b"), ("ab", "b"), ("a", "bb")])
    assert found == [-6.0, -6.0, 0.0, -1.0]


def test_what_stands_for_spaces_is_spaces_where_texts_are_searched() -> None:
    tokenizer = sentencepiece("gemma")
    tokenizer["added_tokens"].append({"id": 5, "content": SPACE * 2, "special": False})
    tokens, types = vocabulary(tokenizer, 900)
    assert (tokens[5], types[5]) == ("  ", 4)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_prefixes(scheme: str) -> None:
    assert space_prefix({"pre_tokenizer": {**METASPACE, "prepend_scheme": scheme}}) == (scheme != "never")


@pytest.mark.parametrize(
    "rules",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": REPLACE, "pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {**METASPACE, "split": True}},
        {},
    ],
)
def test_other_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="before merging, in a way that has no name in GGUF"):
        space_prefix(rules)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no tokenizer.json, and a GGUF file needs one"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "is of type Unigram, and only BPE"),
        ('{"model": {"type": "BPE"', "cannot be read"),
        ('{"model": {"type": "BPE", "vocab": {}}}', "cannot be read"),
    ],
)
def test_tokenizers_that_will_not_do(tmp_path: Path, content: str | None, sentence: str) -> None:
    source = make_model(tmp_path / "tiny", "llama")
    if content is not None:
        (source / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=sentence):
        convert(source, tmp_path / "model.gguf", "gguf", "bf16", lambda *stage: None)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

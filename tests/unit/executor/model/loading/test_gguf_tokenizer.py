"""Tokenizers read from GGUF files make the tokens that the tokenizers they were written of make."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.tokenization_utils_base import generate_merges

from services.executor.model.loading.gguf_file import GgufFile
from services.executor.model.loading.gguf_tokenizer import WHOLE, chat_templates, tokenizer_json, tokenizer_settings
from services.executor.model.loading.pre_tokenizers import SPLIT_RULES, split_name
from shared.errors import ModelLoadError
from tests.unit.executor.model.gguf_models import finish

# Ten scripts, code, emoji, digits, accents as they are and composed, special tokens.
TEXTS = (
    "The cat's on the mat, isn't it? IT'S 12345 or 3.14!",
    "Грамматика и числа 2024 года.",
    "Ελληνικά και Ωmega ώμο",
    "日本語のテキストとカタカナ、漢字。",
    "中文没有空格1234也可以。",
    "한국어 텍스트 입니다",
    "नमस्ते दुनिया ४२",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם",
    "สวัสดีชาวโลก",
    "def camelCase(x1):\n\treturn x1**2  # /path/to\r\n\r\n\n    end",
    "emoji 🙂👍🏽 e\u0301 caf\u00e9  \u00a0 spaces   ",
    "<|start|>user<think>why<|end|>",
)
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"


def written(path: Path, kind: str, tokens: Sequence[str], types: Sequence[int], **fields: Any) -> GgufFile:
    writer = gguf.GGUFWriter(str(path), fields.pop("architecture", "llama"))
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    finish(writer)
    return GgufFile(path)


def read(file: GgufFile) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(file)))


def byte_level(pre: str) -> Tokenizer:
    """Trained on the texts, as a model's own tokenizer splits them."""
    rule = SPLIT_RULES[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=rule.whole))
    parts = json.loads(tokenizer.to_str())
    parts["pre_tokenizer"] = rule.pre_tokenizer()
    parts["normalizer"] = {"type": "NFC"} if rule.composes else None
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def as_gguf(path: Path, tokenizer: Tokenizer, pre: str, **fields: Any) -> GgufFile:
    parts = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {token["content"]: CONTROL if token["special"] else USER for token in parts["added_tokens"]}
    merges = [" ".join(merge) for merge in parts["model"]["merges"]]
    types = [special.get(token, NORMAL) for token in tokens]
    return written(path, "gpt2", tokens, types, pre=pre, merges=merges, eos_token_id=0, bos_token_id=1, **fields)


@pytest.mark.parametrize("pre", sorted({id(rule): name for name, rule in SPLIT_RULES.items()}.values()))
def test_byte_level_tokenizers_make_the_same_tokens(tmp_path: Path, pre: str) -> None:
    own = byte_level(pre)
    found = read(as_gguf(tmp_path / "model.gguf", own, pre, add_bos_token=False))
    for text in TEXTS:
        assert found.encode(text).ids == own.encode(text).ids, text
        assert found.decode(found.encode(text).ids, skip_special_tokens=False) == own.decode(
            own.encode(text).ids, skip_special_tokens=False
        )


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 12345  IT'S", "it|'s| 12345| | IT|'|S"),
        ("smollm", "it's 12345", "it|'s| |1|2|3|4|5"),
        ("llama-bpe", "IT'S 12345 a", "IT|'S| |123|45| a"),
        ("llama-bpe", "a\n\n  b/\n", "a|\n\n| | b|/\n"),
        ("qwen2", "IT'S 12345", "IT|'S| |1|2|3|4|5"),
        ("qwen35", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928\u092e\u0938\u094d\u0924\u0947"),
        ("qwen2", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0928\u092e\u0938|\u094d\u0924|\u0947"),
        ("gpt-4o", "camelCase IT'S 1234", "camel|Case| IT'S| |123|4"),
        ("tekken", "camelCase 1234", "camel|Case| |1|2|3|4"),
        ("tekken", "a /\n/b", "a| /\n/|b"),
        ("seed-coder", "a!\nb", "a|!|\n|b"),
        ("qwen2", "a!\nb", "a|!\n|b"),
        ("bailingmoe2", "it'S 12", "it|'S| |1|2"),
        ("exaone-moe", "a b 12", "a b| |1|2"),
        ("deepseek-v3", "ab漢字かな12345!x", "ab|漢字かな|123|45|!x"),
        ("deepseek-llm", "ab漢字 12!", "ab|漢字| |12|!"),
        ("deepseek-coder", "ab 12", "ab| |1|2"),
        ("kimi-k2", "ab漢字CamelCase 12345", "ab|漢字|Camel|Case| |123|45"),
        ("youtu", "한국어ab1", "한국어|ab|1"),
        ("bloom", "a, b(c", "a|,| b|(|c"),
        ("viking", "a12", "a|1|2"),
        ("superbpe", "a b 1234567", "a b |1|234|567"),
        ("glm4", "1234", "123|4"),
    ],
)
def test_texts_are_cut_as_the_models_cut_them(pre: str, text: str, words: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    parts = json.loads(tokenizer.to_str())
    parts["pre_tokenizer"] = SPLIT_RULES[pre].pre_tokenizer()
    splitter = Tokenizer.from_str(json.dumps(parts)).pre_tokenizer
    spans = [span for _, span in splitter.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in spans] == words.split("|")


def test_every_way_to_split_has_the_name_it_is_written_by() -> None:
    for name, rule in SPLIT_RULES.items():
        assert SPLIT_RULES[str(split_name(rule.pre_tokenizer()))].steps == rule.steps, name
    assert split_name({"type": "Whitespace"}) is None


def sentencepiece() -> tuple[list[str], list[int], list[float], dict[str, int]]:
    """Tokens, types, scores, and the pieces by id."""
    trained = Tokenizer(models.BPE())
    texts = [SPACE + text.replace(" ", SPACE) for text in TEXTS[:6]] * 3
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda one: one[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    scores = [0.0] * len(tokens)
    for piece, number in learned:
        tokens.append(piece)
        types.append(NORMAL)
        scores.append(-float(number))
    tokens += ["<think>", "[PAD0]"]
    types += [USER, UNUSED]
    scores += [-1e6, -1e6]
    return tokens, types, scores, {token: number for number, token in enumerate(tokens[:-1])}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_sentencepiece_makes_the_same_tokens(tmp_path: Path, prefix: bool, listed: bool) -> None:
    tokens, types, scores, ids = sentencepiece()
    merges = generate_merges(ids, dict(zip(tokens[:-1], scores[:-1], strict=True)))
    own = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepend = [normalizers.Prepend(SPACE)] if prefix else []
    own.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", SPACE)])
    own.add_special_tokens(["<unk>", "<s>", "</s>"])
    own.add_tokens([AddedToken("<think>", normalized=False)])
    fields = {"scores": scores, "add_space_prefix": prefix, "bos_token_id": 1, "eos_token_id": 2}
    if listed:
        fields["merges"] = [" ".join(merge) for merge in merges]
    found = read(written(tmp_path / "model.gguf", "llama", tokens, types, **fields))
    for text in (*TEXTS, "<s>the mat</s> cat", " the", "  cat<think> mat"):
        assert found.encode(text).ids == [1, *own.encode(text).ids], text
        if "<" not in text:
            assert found.decode(found.encode(text).ids) == text


def test_gemma_keeps_spaces_with_the_word_before(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "a", "b", SPACE, f"a{SPACE}", "ab"]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[NORMAL] * 6]
    fields = {"scores": [0.0] * len(tokens), "bos_token_id": 2, "eos_token_id": 1, "architecture": "gemma3"}
    found = read(written(tmp_path / "model.gguf", "llama", tokens, types, **fields))
    assert found.encode("ab a  b").tokens == ["<bos>", "ab", SPACE, "a", SPACE * 2, "b"]
    assert found.decode(found.encode("ab a  b").ids) == "ab a  b"


def test_unigrams_make_the_same_tokens(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), (f"{SPACE}the", -2.0), (f"{SPACE}cat", -3.0), ("t", -4.0)]
    pieces += [(f"{SPACE}c", -5.0), ("at", -3.5), ("a", -6.0), (SPACE, -7.0), ("h", -6.5), ("e", -6.5)]
    tokens, scores = zip(*pieces, strict=True)
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * (len(tokens) - 3)]
    own = Tokenizer(models.Unigram(pieces, unk_id=0))
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    fields = {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True}
    found = read(written(tmp_path / "model.gguf", "t5", tokens, types, **fields))
    for text in ("the cat", "that  the", "a cat z"):
        assert found.encode(text).ids == [1, *own.encode(text).ids, 2]
    found = read(written(tmp_path / "roberta.gguf", "t5", tokens, types, **fields, seperator_token_id=2))
    assert found.encode("a", "a").tokens == ["<s>", f"{SPACE}", "a", "</s>", "</s>", f"{SPACE}", "a", "</s>"]


def test_word_pieces_are_spelled_as_bert_has_them(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[unused0]", f"{SPACE}the", f"{SPACE}cat", "s", f"{SPACE}!", "[MASK]"]
    types = [CONTROL, UNKNOWN, CONTROL, CONTROL, NORMAL, *[NORMAL] * 4, CONTROL]
    fields = {"cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "architecture": "bert"}
    found = read(written(tmp_path / "model.gguf", "bert", tokens, types, **fields))
    assert found.encode("The Cats!").tokens == ["[CLS]", "the", "cat", "##s", "!", "[SEP]"]
    assert found.encode("th\u00e9 [MASK]", "cat").tokens == ["[CLS]", "the", "[MASK]", "[SEP]", "cat", "[SEP]"]
    assert found.encode("dog", "cat").type_ids == [0, 0, 0, 1, 1]
    assert found.token_to_id("[unused0]") == 4


@pytest.mark.parametrize(("begins", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_texts_begin_as_the_file_says_or_its_kind_has_it(tmp_path: Path, begins: bool | None, first: list[int]) -> None:
    own = byte_level("llama-bpe")
    said = {} if begins is None else {"add_bos_token": begins}
    found = read(as_gguf(tmp_path / "model.gguf", own, "llama-bpe", **said))
    assert found.encode("the mat").ids == [*first, *own.encode("the mat").ids]


def test_a_whole_tokenizer_json_is_taken_at_its_word(tmp_path: Path) -> None:
    own = byte_level("tekken")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_string(WHOLE, own.to_str())
    finish(writer)
    assert read(GgufFile(tmp_path / "model.gguf")).encode(TEXTS[0]).ids == own.encode(TEXTS[0]).ids


def test_settings_and_templates(tmp_path: Path) -> None:
    own = byte_level("qwen2")
    file = as_gguf(tmp_path / "model.gguf", own, "qwen2", padding_token_id=0)
    settings = tokenizer_settings(file, 0, 4096)
    assert (settings["eos_token"], settings["bos_token"], settings["pad_token"]) == ("<|end|>", "<|start|>", "<|end|>")
    assert settings["model_max_length"] == 4096
    assert chat_templates(file) == {}
    plain, tools = "{{ messages }}", "{% generation %}{{ messages }}{% endgeneration %}"
    found = chat_templates(with_template(tmp_path, plain, tools))
    assert found == {"chat_template.jinja": plain, "additional_chat_templates/tool_use.jinja": tools}
    assert chat_templates(with_template(tmp_path, "")) == {}


def with_template(tmp_path: Path, template: Any, tool_use: str = "") -> GgufFile:
    writer = gguf.GGUFWriter(str(tmp_path / "templates.gguf"), "llama")
    kinds = gguf.GGUFValueType.get_type(template), gguf.GGUFValueType.STRING
    writer.add_key_value("tokenizer.chat_template", template, *kinds)
    writer.add_string("tokenizer.chat_template.tool_use", tool_use)
    finish(writer)
    return GgufFile(tmp_path / "templates.gguf")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% if messages", r"is no Jinja template \(unexpected .*, in its line 1\); fetch it again, or choose another"),
        ("{{ if .System }}{{ .System }}{{ end }}", "is no Jinja template"),
        ("{{ messages | shout }}", r"is no Jinja template \(No filter named 'shout'"),
        ("chatml", "shows no messages, so it is no chat template"),
        (7, "is no text"),
        (["{{ messages }}"], "is no text"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path: Path, template: Any, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"its tokenizer\.chat_template {problem}"):
        chat_templates(with_template(tmp_path, template))


def _doubled(tokens: list[str]) -> Iterable[str]:
    return [*tokens[:-1], tokens[0]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon', a way to split texts that is not known"),
        ({"merges": ["a b", "q zz"]}, "tokenizer.ggml.merges has 'q zz', which no tokens make up"),
        ({"merges": ["a b", "loner"]}, "tokenizer.ggml.merges has 'loner', which no tokens make up"),
        ({"tokens": _doubled}, "has 'a' twice, as 0 and 3"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is no list of texts"),
        ({"types": [1, 1]}, "tokenizer.ggml.token_type has 2 values for 4 tokens"),
        ({"kind": "rwkv"}, "a tokenizer of the kind 'rwkv', which is not served"),
        ({"bos_token_id": 99}, "says that token 99 is its bos token, of 4 tokens"),
    ],
    ids=["split", "merge", "merge-of-one", "doubled", "numbers", "types", "kind", "bos"],
)
def test_tokenizers_with_holes_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    tokens = ["a", "b", "ab", "q"]
    if isinstance(double := change.get("tokens"), Callable):  # type: ignore[arg-type]
        tokens = list(double(tokens))
    fields = {"pre": "gpt-2", "merges": ["a b"], "add_bos_token": True, "bos_token_id": 3}
    fields |= {name: value for name, value in change.items() if name in ("pre", "merges", "bos_token_id")}
    types = change.get("types", [1] * 4)
    file = written(tmp_path / "model.gguf", change.get("kind", "gpt2"), tokens, types, **fields)
    with pytest.raises(ModelLoadError) as refused:
        tokenizer_settings(file, 0, 64) if "bos_token_id" in change else read(file)
    assert sentence in str(refused.value)

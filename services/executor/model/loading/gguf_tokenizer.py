"""The tokenizer of a GGUF file, in the words of tokenizer.json and tokenizer_config.json.

    tokenizer.ggml.model │ gpt2: bytes, merged │ llama, gemma4: SentencePiece's pieces, merged by scores or as listed
                         │ t5: pieces, the likeliest (unigram) │ bert: WordPiece

A file that carries tokenizer.json whole (`tokenizer.huggingface.json`) is taken at its word. Source: the GGUF
specification (ggml, docs/gguf.md), and llama.cpp for what it means that a key is missing (llama-vocab.cpp).
"""

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from services.executor.model.loading.pre_tokenizers import SPLIT_RULES, SplitRule
from shared.errors import ModelLoadError

if TYPE_CHECKING:
    from services.executor.model.loading.gguf_file import GgufFile

WHOLE = "tokenizer.huggingface.json"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
_SPACE = "\u2581"
_MARKED_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
# Of architectures whose files have no `tokenizer.ggml.pre` where they are older than the key; all others say it.
GPT2_SPLITS = {"qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2", "gpt2": "gpt-2"}
# tokenizer_config.json's name -> GGUF's, in its own spelling
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "cls": "cls",
    "mask": "mask",
}
_ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_TEXT_A: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
_NO_SPACE_WORDS = "##"


def tokenizer_json(file: "GgufFile") -> dict[str, Any]:
    """What tokenizer.json holds. Raises `ModelLoadError`."""
    said = file.header.metadata
    if isinstance(whole := said.get(WHOLE), str):
        try:
            if not isinstance(read := json.loads(whole), dict):
                raise ValueError("it is no object")
            return read
        except ValueError as error:
            raise ModelLoadError(f"The file {file.path} has an invalid {WHOLE} ({error}); fetch it again.") from None
    kind = said.get(_KIND)
    if kind not in _MAKERS:
        raise ModelLoadError(
            f"The file {file.path} has a tokenizer of the kind {kind!r:.40}, which is not served; known are "
            f"{', '.join(sorted(_MAKERS))}: choose another file, or a safetensors directory."
        )
    vocabulary = _Vocabulary(file)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added,
        **_MAKERS[str(kind)](vocabulary),
    }


def tokenizer_settings(file: "GgufFile", end: int, context_length: int) -> dict[str, Any]:
    """What tokenizer_config.json holds; `end` is the token that ends a text. Raises `ModelLoadError`."""
    tokens, said = file.array("tokenizer.ggml.tokens"), file.header.metadata
    ids = {name: said.get(f"tokenizer.ggml.{word}_token_id") for name, word in _SPECIAL.items()} | {"eos": end}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **{f"{name}_token": _token(file, tokens, name, number) for name, number in ids.items() if number is not None},
    }


def chat_templates(file: "GgufFile") -> dict[str, str]:
    """By the name of a file of a model directory. Raises `ModelLoadError` where one is none."""
    from services.executor.model.chat_templates import problem_with  # with jinja2: not at every start

    names = {"tokenizer.chat_template": "chat_template.jinja"}
    names["tokenizer.chat_template.tool_use"] = "additional_chat_templates/tool_use.jinja"
    found: dict[str, str] = {}
    for key, path in names.items():
        template = file.header.metadata.get(key) if key in file.header.spans else ""
        problem = problem_with(template) if isinstance(template, str) and template else ""
        if problem or not isinstance(template, str):
            raise ModelLoadError(
                f"The file {file.path} cannot be used: its {key} {problem or 'is no text'}; fetch it again, or choose "
                "another."
            )
        found |= {path: template} if template else {}
    return found


def _token(file: "GgufFile", tokens: Sequence[str], name: str, number: object) -> str:
    if not isinstance(number, int) or not 0 <= number < len(tokens):
        raise ModelLoadError(
            f"The file {file.path} says that token {number!r:.20} is its {name} token, of {len(tokens)} tokens; fetch "
            "it again."
        )
    return tokens[number]


_KIND = "tokenizer.ggml.model"


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a file, checked to be one list of their own."""

    file: "GgufFile"

    @cached_property
    def tokens(self) -> list[str]:
        """By id."""
        if not (tokens := self._texts("tokenizer.ggml.tokens")):
            raise self._invalid("tokenizer.ggml.tokens", "is empty")
        return tokens

    @cached_property
    def kinds(self) -> list[int]:
        return self._beside("token_type")

    @cached_property
    def scores(self) -> list[float]:
        return self._beside("scores")

    @cached_property
    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before anything else is done to it."""
        return [
            {"id": number, "content": token, **_ADDED, "special": kind != _USER}
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (_CONTROL, _USER, _UNKNOWN) and token
        ]

    def ids(self, spelled: Sequence[str] | None = None) -> dict[str, int]:
        """Of all tokens that are used, as `spelled`. Raises `ModelLoadError` where two are the same."""
        ids: dict[str, int] = {}
        for number, (token, kind) in enumerate(zip(spelled or self.tokens, self.kinds, strict=True)):
            if kind != _UNUSED and ids.setdefault(token, number) != number:
                raise self._invalid("tokenizer.ggml.tokens", f"has {token[:40]!r} twice, as {ids[token]} and {number}")
        return ids

    def merges(self, ids: Mapping[str, int]) -> list[tuple[str, str]]:
        """As the file lists them. Raises `ModelLoadError` where one is of texts that are no tokens."""
        pairs = []
        for merge in self._texts("tokenizer.ggml.merges"):
            first, _, second = merge[1:].partition(" ")  # a token may begin with a space, and none is empty
            first = merge[:1] + first
            if first not in ids or second not in ids or first + second not in ids:
                raise self._invalid("tokenizer.ggml.merges", f"has {merge[:60]!r}, which no tokens make up")
            pairs.append((first, second))
        return pairs

    def number(self, name: str) -> int | None:
        """The id of a special token, by the file's word for it."""
        found = self.file.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if found is not None:
            _token(self.file, self.tokens, name, found)
        return found if isinstance(found, int) else None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.file.header.metadata.get(f"tokenizer.ggml.{name}", default))

    @cached_property
    def unknown(self) -> str | None:
        number = self.number("unknown")
        if number is None and _UNKNOWN in self.kinds:
            number = self.kinds.index(_UNKNOWN)
        return None if number is None else self.tokens[number]

    def framed(self, begins: bool, ends: bool, *, classes: bool = False) -> dict[str, Any] | None:
        """A `post_processor` that puts tokens around a text, where the file or its kind says so. `classes`: as BERT's,
        which has names of its own for them."""
        begin, end = self.number("bos"), self.number("eos")
        if classes:
            named = self.number("cls"), self.number("seperator")
            begin, end = (b if a is None else a for a, b in zip(named, (begin, end), strict=True))
        first = begin if begin is not None and self.flag("add_bos_token", begins) else None
        last = end if end is not None and self.flag("add_eos_token", ends) else None
        if first is None and last is None:
            return None
        between = [] if classes or first is None else [first]
        if last is not None and last == self.number("seperator"):  # RoBERTa's stands twice between two texts
            between = [last] if self.tokens[last] == "</s>" else []
        return _template(self.tokens, first, last, between)

    def split_rule(self) -> SplitRule:
        """Raises `ModelLoadError` for a name that is not known."""
        said = self.file.header.metadata
        architecture = str(said.get("general.architecture"))
        name = said.get("tokenizer.ggml.pre") or GPT2_SPLITS.get(architecture)
        if name in SPLIT_RULES:
            return SPLIT_RULES[str(name)]
        raise self._invalid("tokenizer.ggml.pre", f"is {name!r:.40}, a way to split texts that is not known")

    def _texts(self, key: str) -> list[str]:
        texts = self.file.array(key)
        if texts and not isinstance(texts[0], str):
            raise self._invalid(key, "is no list of texts")
        return texts

    def _beside(self, name: str) -> list[Any]:
        values = self.file.array(f"tokenizer.ggml.{name}")
        if len(values) != len(self.tokens):
            raise self._invalid(f"tokenizer.ggml.{name}", f"has {len(values)} values for {len(self.tokens)} tokens")
        return values

    def _invalid(self, key: str, why: str) -> ModelLoadError:
        return ModelLoadError(f"The file {self.file.path} cannot be used: its {key} {why}; fetch it again.")


def _template(tokens: Sequence[str], first: int | None, last: int | None, between: Sequence[int]) -> dict[str, Any]:
    def special(number: int | None, type_id: int) -> list[dict[str, Any]]:
        return [] if number is None else [{"SpecialToken": {"id": tokens[number], "type_id": type_id}}]

    other = {"Sequence": {"id": "B", "type_id": 1}}
    head = [*special(first, 0), _TEXT_A, *special(last, 0)]
    used = [number for number in (first, last) if number is not None]
    return {
        "type": "TemplateProcessing",
        "single": head,
        "pair": [*head, *(one for number in between for one in special(number, 1)), other, *special(last, 1)],
        "special_tokens": {
            tokens[number]: {"id": tokens[number], "ids": [number], "tokens": [tokens[number]]} for number in used
        },
    }


def _bytes(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Byte-level BPE."""
    rule = vocabulary.split_rule()
    ids = vocabulary.ids()
    frame = vocabulary.framed(begins=rule.begins, ends=False)
    own = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    composes = vocabulary.flag("normalizer.nfc", rule.composes)
    return {
        "normalizer": {"type": "NFC"} if composes else None,
        "pre_tokenizer": rule.pre_tokenizer(),
        "post_processor": own if frame is None else {"type": "Sequence", "processors": [own, frame]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, vocabulary.merges(ids), ignore_merges=rule.whole),
    }


def _pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's BPE, with a token for each byte."""
    said = vocabulary.file.header.metadata
    if "gemma" in str(said.get("general.architecture")):
        return _gemma(vocabulary)
    ids = vocabulary.ids()
    prefix = vocabulary.flag("add_space_prefix", True)
    steps = [{"type": "Prepend", "prepend": _SPACE}, _MARKED_SPACES] if prefix else [_MARKED_SPACES]
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": vocabulary.framed(begins=True, ends=False),
        "decoder": _piece_decoder(strip=prefix),
        "model": _bpe_of_pieces(vocabulary, ids, lambda: dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))),
    }


def _gemma(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's, of which spaces stay with the word before them. Files have runs of spaces as they are, and the
    order of the tokens, not their scores, is that of the merges."""
    spelled = [_SPACE * len(token) if token and not token.strip(" ") else token for token in vocabulary.tokens]
    ids = vocabulary.ids(spelled)
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {
        "normalizer": _MARKED_SPACES,
        "pre_tokenizer": spaces,
        "post_processor": vocabulary.framed(begins=True, ends=False),
        "decoder": _piece_decoder(strip=False),
        "model": _bpe_of_pieces(vocabulary, ids, lambda: {token: -number for token, number in ids.items()}),
    }


def _bpe_of_pieces(
    vocabulary: _Vocabulary, ids: Mapping[str, int], scores: Callable[[], Mapping[str, float]]
) -> dict[str, Any]:
    """Merged as the file lists it, or where it does not by `scores`."""
    listed = "tokenizer.ggml.merges" in vocabulary.file.header.spans
    merges = vocabulary.merges(ids) if listed else merges_of(ids, scores())
    return _bpe(ids, merges, unk_token=vocabulary.unknown, fuse_unk=True, byte_fallback=True)


def _likeliest(vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece's unigrams."""
    said = vocabulary.file.header.metadata
    charsmap = "tokenizer.ggml.precompiled_charsmap"
    steps: list[dict[str, Any]] = []
    if charsmap in vocabulary.file.header.spans:
        table = bytes(value & 0xFF for value in vocabulary.file.array(charsmap))
        steps.append({"type": "Precompiled", "precompiled_charsmap": b64encode(table).decode()})
    if vocabulary.flag("remove_extra_whitespaces", False):
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    prefix = said.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "always" if prefix else "never"
    spaces = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": True}
    unknown = vocabulary.unknown
    vocabulary.ids()  # which refuses doubled tokens
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, spaces]},
        "post_processor": vocabulary.framed(begins=False, ends=True),
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": None if unknown is None else vocabulary.tokens.index(unknown),
            "vocab": [[token, score] for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)],
            "byte_fallback": _BYTE in vocabulary.kinds,
        },
    }


def _word_pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    """BERT's: files mark what begins a word, tokenizer.json what goes on with one."""
    spelled = [
        _as_word_piece(token) if kind == _NORMAL else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    lowercase = vocabulary.flag("normalizer.lowercase", True)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag("normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": vocabulary.framed(begins=True, ends=True, classes=True),
        "decoder": {"type": "WordPiece", "prefix": _NO_SPACE_WORDS, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.unknown or "[UNK]",
            "continuing_subword_prefix": _NO_SPACE_WORDS,
            "max_input_chars_per_word": 100,
            "vocab": vocabulary.ids(spelled),
        },
    }


def _as_word_piece(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(_SPACE) else _NO_SPACE_WORDS + token


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **fields,
        "vocab": dict(ids),
        "merges": merges,
    }


def _piece_decoder(*, strip: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def merges_of(ids: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges that a vocabulary stands for: of each piece all cuts into two others; those of the highest score come
    first, as SentencePiece has it."""
    cuts: list[tuple[float, int, int, str, str]] = []
    for piece, score in scores.items():
        for at in range(1, len(piece)):
            if (first := piece[:at]) in ids and (second := piece[at:]) in ids:
                cuts.append((-score, ids[first], ids[second], first, second))
    return [(first, second) for *_, first, second in sorted(cuts, key=lambda cut: (cut[0], -len(cut[3]), cut[1:3]))]


# By `tokenizer.ggml.model`.
_MAKERS = {"gpt2": _bytes, "llama": _pieces, "gemma4": _pieces, "t5": _likeliest, "bert": _word_pieces}

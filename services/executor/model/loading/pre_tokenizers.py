"""How byte-level tokenizers split text before merging, by the name that GGUF files have for it (`tokenizer.ggml.pre`).

A rule is written as tokenizer.json has it: expressions one after the other, each of which cuts what those before it
left whole. Source: the models' own tokenizer.json; which name stands for which: llama.cpp, llama-vocab.cpp.
"""

from dataclasses import dataclass
from typing import Any

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _llama3(digits: str) -> str:
    return rf"{_WORDS}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _cased(digits: str, words: str) -> str:
    """Words are cut where lower case is followed by upper case, as of `camelCase`."""
    first, second = rf"{_LEAD}{_UPPER}*{_LOWER}+{words}", rf"{_LEAD}{_UPPER}+{_LOWER}*{words}"
    return rf"{first}|{second}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


_LLAMA = _llama3(r"\p{N}{1,3}")
_QWEN2 = _llama3(r"\p{N}")
_QWEN35 = rf"{_WORDS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_REST}"
_GPT4O = _cased(r"\p{N}{1,3}", rf"{_WORDS}?")
_TEKKEN = _cased(r"\p{N}", "")
_SEED_CODER = rf"{_WORDS}|{_LEAD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_WORDS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}"
)
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"{_LEAD}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{_WORDS}?",
        rf"{_LEAD}[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{_WORDS}?",
        r"\p{N}{1,3}",
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",
    )
)
# Letters of scripts that have cases, as DeepSeek lists them: code points, some of which look alike or compose.
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""


def _characters(ranges: str) -> str:
    return "".join("-".join(chr(int(code, 16)) for code in one.split("-")) for one in ranges.split())


_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_characters(_CASED)}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    "\\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
_SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-\u309f\u30a0-\u30ff]+"

BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True)
class SplitRule:
    """How texts are cut before they are merged."""

    steps: tuple[dict[str, Any], ...]  # of tokenizer.json's `pre_tokenizer`, before the bytes
    words: bool = False  # whether what is left is cut by GPT-2's expression
    whole: bool = False  # a word that is a token needs no merges (`ignore_merges`)
    begins: bool = False  # whether texts begin with the BOS token where the file does not say
    # Whether accents are composed with their letters first (NFC) where the file does not say
    composes: bool = False
    behind: tuple[dict[str, Any], ...] = ()  # steps behind the bytes

    def pre_tokenizer(self) -> dict[str, Any]:
        """In the words of tokenizer.json."""
        bytes_ = {**BYTE_LEVEL, "use_regex": self.words}
        steps = [*self.steps, bytes_, *self.behind]
        return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else bytes_


def _split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _by(*expressions: str, **fields: Any) -> SplitRule:
    return SplitRule(tuple(map(_split, expressions)), **fields)


_RULES: tuple[tuple[SplitRule, str], ...] = (
    (
        SplitRule((), words=True),
        "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion granite-docling roberta-bpe "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code",
    ),
    (
        SplitRule(
            ({"type": "Punctuation", "behavior": "Contiguous"},),
            words=True,
            behind=({"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]")),
        ),
        "falcon",
    ),
    (SplitRule((_DIGITS,), words=True), "smollm refact starcoder command-r codeshell exaone minerva-7b mellum2"),
    (
        _by(_LLAMA, whole=True, begins=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (_by(_LLAMA), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (_by(_QWEN2, composes=True), "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
    (_by(_QWEN2), "stablelm2 hunyuan solar-open grok-2"),
    (_by(_QWEN35, composes=True), "qwen35"),
    (_by(_GPT4O), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_by(_TEKKEN, whole=True, begins=True), "tekken"),
    (_by(_SEED_CODER), "seed-coder"),
    (_by(_BAILING), "bailingmoe bailingmoe2 llada-moe"),
    (_by(_EXAONE_MOE), "exaone-moe"),
    (_by(r"\p{N}{1,3}", _KANA, _DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm"),
    (_by(*_DEEPSEEK_LLM, r"\p{N}+"), "deepseek-llm"),
    (_by(*_DEEPSEEK_CODER, r"\p{N}"), "deepseek-coder"),
    (_by(_YOUTU, _cased(r"\p{N}", rf"{_WORDS}?"), whole=True), "youtu"),
    (_by(_KIMI), "kimi-k2"),
    (_by(_SENTENCES), "bloom poro-chat gpt3-finnish"),
    (_by(_SENTENCES, r"\p{N}"), "viking"),
    (_by(r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "superbpe"),
)
SPLIT_RULES = {name: rule for rule, names in _RULES for name in names.split()}  # by `tokenizer.ggml.pre`


def split_name(pre_tokenizer: dict[str, Any]) -> str | None:
    """GGUF's name for a `pre_tokenizer` of tokenizer.json; None where it has none here."""
    wanted = _compared(pre_tokenizer)
    return next((name for name, rule in SPLIT_RULES.items() if _compared(rule.pre_tokenizer()) == wanted), None)


def _compared(pre_tokenizer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What of it changes tokens."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return [
        tuple(sorted((name, str(value)) for name, value in step.items() if name != "trim_offsets")) for step in steps
    ]

"""What a request asks of the processor: `SamplingParams.extra_args["ryzanstein"]`, checked."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

KEY = "ryzanstein"
GREEDY_TEMPERATURE = 1e-5  # at or below it the most likely token is taken
GRAMMAR_BYTES = 256 << 10  # the longest grammar, in UTF-8
MOST_ID = 256  # characters of an id

_RANGES: dict[str, tuple[type, float, float]] = {
    "seed": (int, 0, (1 << 64) - 1),
    "prompt_tokens": (int, 0, 1 << 31),
    "temperature": (float, 0, 1e6),
    "top_k": (int, 0, 1 << 31),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-6, 1e6),
    "presence_penalty": (float, -1e6, 1e6),
    "frequency_penalty": (float, -1e6, 1e6),
    "min_tokens": (int, 0, 1 << 31),
    "vocab_size": (int, 0, 1 << 31),
}
# vLLM's own parameters, which would change the logits before or after: what they must be.
_OUTSIDE = {
    **dict.fromkeys(("temperature", "presence_penalty", "frequency_penalty", "min_tokens"), 0),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words"), 0),  # 0: absent
    "repetition_penalty": 1,
}


@dataclass(frozen=True)
class SamplingOptions:
    """`extra_args["ryzanstein"]`, checked. What is absent is off."""

    seed: int
    prompt_tokens: int  # how many tokens of vLLM's prompt are the prompt; behind them is output of earlier attempts
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # output tokens before which none of `stop_token_ids` is drawn
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()  # empty: all
    bad_words: Sequence[Sequence[int]] = ()
    grammar: tuple[str, str] | None = None  # kind, text
    vocab_size: int = 0  # logits from here on are padding; 0: none are
    id: str = ""  # by which whoever asks is told that it has failed (`processor.FAILURES`)

    @classmethod
    def of(cls, given: Any) -> "SamplingOptions":
        """`given`: an object, or its JSON where a server passes on no objects (`vllm_xargs`). Raises ValueError with
        one sentence."""
        if isinstance(given, str):
            given = _decoded(given)
        if not isinstance(given, Mapping):
            raise ValueError(f"extra_args['{KEY}'] must be an object.")
        if unknown := sorted(str(name) for name in set(given) - {one.name for one in fields(cls)}):
            raise ValueError(f"extra_args['{KEY}'] has the unknown name {unknown[0]!r:.80}.")
        if missing := [name for name in ("seed", "prompt_tokens") if name not in given]:
            raise ValueError(f"extra_args['{KEY}'] lacks {missing[0]!r}.")
        options = cls(**{name: _PARSERS[name](name, value) for name, value in given.items()})
        tokens = [
            *options.logit_bias,
            *options.allowed_token_ids,
            *(token for word in options.bad_words for token in word),
        ]
        if options.vocab_size and tokens and max(tokens) >= options.vocab_size:
            raise ValueError(f"extra_args['{KEY}'] names a token outside the vocabulary.")
        return options

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def counts(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def masks(self) -> bool:
        return bool(
            self.grammar or self.allowed_token_ids or self.bad_words or (self.min_tokens and self.stop_token_ids)
        )

    @property
    def edits(self) -> bool:
        return bool(self.counts or self.masks or self.logit_bias)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"extra_args['{KEY}'] is not JSON.") from None


def _refuse(name: str, wanted: str) -> ValueError:
    return ValueError(f"{name} in extra_args['{KEY}'] must be {wanted}.")


def _number(name: str, value: Any) -> float:
    kind, least, most = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise _refuse(name, "a whole number" if kind is int else "a number")
    if not least <= value <= most:  # NaN fails this too
        raise _refuse(name, f"between {least:g} and {most:g}")
    return int(value) if kind is int else float(value)


def _tokens(name: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        raise _refuse(name, "a list of token ids")
    return list(value)


def _words(name: str, value: Any) -> list[list[int]]:
    if not isinstance(value, (list, tuple)) or not all(value):
        raise _refuse(name, "a list of words, each a list of token ids that is not empty")
    return [_tokens(name, word) for word in value]


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _refuse(name, "an object of tokens and amounts")
    found = {}
    for key, amount in value.items():
        token = (
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        )  # JSON's
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise _refuse(name, "an object of token ids and amounts")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not -1e6 <= amount <= 1e6:
            raise _refuse(name, "an object of amounts between -1e+06 and 1e+06")
        found[token] = float(amount)
    return found


def parse_grammar(name: str, value: Any) -> tuple[str, str]:
    if not isinstance(value, Mapping) or set(value) != {"kind", "text"} or not isinstance(value["text"], str):
        raise _refuse(name, "an object of a kind and a text")
    if value["kind"] not in ("json_schema", "regex", "lark"):
        raise _refuse(f"the kind of {name}", "json_schema, regex or lark")
    if len(value["text"].encode("utf-8", "replace")) > GRAMMAR_BYTES:
        raise _refuse(name, f"at most {GRAMMAR_BYTES} bytes long")
    return value["kind"], value["text"]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_ID:
        raise _refuse(name, f"a text of at most {MOST_ID} characters")
    return value


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_RANGES, _number),
    "stop_token_ids": _tokens,
    "allowed_token_ids": _tokens,
    "bad_words": _words,
    "logit_bias": _biases,
    "grammar": parse_grammar,
    "id": _text,
}


def refuse_outside(params: Any) -> None:
    """What vLLM applies itself would come before or after what is applied here, and count the wrong tokens."""
    for name, neutral in _OUTSIDE.items():
        if (getattr(params, name, None) or 0) not in (0, neutral):
            raise ValueError(f"{name} must be neutral beside extra_args['{KEY}'], which has one of its own.")

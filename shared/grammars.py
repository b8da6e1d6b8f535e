"""From a `Grammar` to what llguidance compiles: the same in gateways, which check it, and in rings, which follow it.

Compiling is code of others on input of strangers. It is bounded (`limits`), but a grammar of a few hundred bytes can
still take minutes, gigabytes or all of the stack, so what is not known yet is compiled in a process of its own first
(`python -m shared.grammars`). There it costs that process its life, and whoever asked hears a reason:

    check ──grammar──▶ process: limits on CPU time and memory, the usual stack
          ◀──verdict──  (it ends: the grammar is to blame, and the next one gets a new process)
"""

import contextlib
import math
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from shared.child_environment import environment_without_settings
from shared.messages import Grammar

LARGEST_EXACT = 2**53
_LONG_NUMBER = re.compile(rb"[0-9]{16}")  # in the JSON of each number beyond that
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_MOST_OF_REASON = 300
_PICTURE = re.compile(r"^\s*(\^+|\d+ \|.*)$", re.MULTILINE)

# Between JSON's tokens: nothing, a blank, or a line break with an indentation. Left free, white space is what a
# model that has lost its way puts out for ever.
_WHITESPACE = r"( |\n[ \t]{0,40})"
# Over what a schema says of itself under `x-guidance`: a keyword that cannot be held is an error.
_OPTIONS = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": False, "lenient": False}


def source_of(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError where it is none at all."""
    if grammar.kind == "json_schema":
        schema = msgspec.json.decode(grammar.text)  # msgspec's error is a ValueError
        if not isinstance(schema, dict):
            raise ValueError("the schema is not a JSON object")
        if (number := inexact(schema)) is not None:
            raise ValueError(f"{number} in it is a whole number beyond 2^53, which cannot be held exactly")
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_OPTIONS)  # type: ignore[arg-type]
    if grammar.kind == "regex" and grammar.text:
        return LLMatcher.grammar_from_regex(grammar.text)
    if not grammar.text.strip():
        raise ValueError("it is empty")
    return LLMatcher.grammar_from_lark(grammar.text)


def inexact(schema: Any) -> int | None:
    """A number under `const` or `enum` that llguidance, which keeps numbers as doubles, would take for its
    neighbour; None: there is none."""
    if _LONG_NUMBER.search(msgspec.json.encode(schema)) is None:  # nearly always, and in milliseconds
        return None
    level: list[tuple[Any, bool]] = [(schema, False)]
    while level:
        inner: list[tuple[Any, bool]] = []
        for value, named in level:
            if isinstance(value, dict):
                inner += [(item, named or key in ("const", "enum")) for key, item in value.items()]
            elif isinstance(value, list):
                inner += [(item, named) for item in value]
            elif named and isinstance(value, int) and abs(value) > LARGEST_EXACT:
                return value
        level = inner
    return None


def limits() -> LLParserLimits:
    """What compiling and each step may cost: some ten milliseconds and some ten megabytes a sequence."""
    return LLParserLimits(
        max_items_in_row=10_000,  # of a schema, some four for each property that may follow
        max_lexer_states=50_000,  # 1 to 2 kB each
        verbose_errors=False,
    )


def shortened(reason: str) -> str:
    """llguidance's words for what is wrong, as one line of bounded length, without its pictures of the place."""
    if reason.startswith("NoExtension"):
        return "no token of this model fits"
    line = " ".join(_PICTURE.sub("", reason).replace("<non-verbose/>", "").split()).rstrip(".")
    return line if len(line) <= _MOST_OF_REASON else f"{line[: _MOST_OF_REASON - 3]}..."


def embedded(schema: Mapping[str, Any]) -> str:
    """`schema` as an expression within a grammar in Lark's notation, with the same options."""
    text = msgspec.json.encode({**schema, "x-guidance": _OPTIONS}).decode()
    return "%json " + text.replace("::=", "\\u003a:=")  # else it would look like GBNF (`verdict_on`)


CPU_SECONDS = 2  # CPU time of one grammar at most; the kernel counts whole seconds
MEMORY = 2 << 30  # bytes of address space
ANSWER_WITHIN = 60.0  # seconds of waiting for a process that gets no processor
TOO_COMPLEX = "it is too complex to compile; make it smaller or simpler"
# In llguidance's words for that: they name its own bounds, and a page of its own notation.
_GAVE_UP = ("Unable to determine if", "fuel exhausted")


class GrammarVerdict(msgspec.Struct, frozen=True):
    """What became of a grammar."""

    problem: str = ""  # why it does not compile; empty: it does
    # The grammar to use, where it compiles: the same, or what stands for it in Lark's notation.
    grammar: Grammar | None = None


class GrammarCheck:
    """Asks one process, started with the first grammar. For one thread at a time; blocks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> GrammarVerdict:
        """Whether `grammar` compiles, without any model's tokens."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        answer = _ask(process, msgspec.json.encode(grammar) + b"\n")
        if not answer:
            self.close()
            return GrammarVerdict(TOO_COMPLEX)
        return msgspec.json.decode(answer, type=GrammarVerdict)

    def interrupt(self) -> None:
        """Ends a `check` that another thread waits for."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process. The next `check` starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.close()
        return subprocess.Popen(
            [sys.executable, "-m", "shared.grammars"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment_without_settings(),
        )


def _ask(process: "subprocess.Popen[bytes]", line: bytes) -> bytes:
    """The answer's line; empty when the process has ended over it, or does not come to an end."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        if waiting.poll(ANSWER_WITHIN * 1000):
            return process.stdout.readline()
    return b""


# --- in that process -----------------------------------------------------------------------------


def main() -> None:
    """Answers a line of standard input with one of standard output, until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + CPU_SECONDS)
        verdict = verdict_on(msgspec.json.decode(line, type=Grammar))
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def verdict_on(grammar: Grammar) -> GrammarVerdict:
    try:
        if grammar.kind == "lark" and "::=" in grammar.text:
            grammar = Grammar("lark", _from_gbnf(grammar.text))
        failed, words = LLMatcher.validate_grammar_with_warnings(source_of(grammar), limits=limits())
    except (ValueError, RecursionError) as error:  # msgspec's, llguidance's, and the converter's
        return GrammarVerdict(shortened(str(error)))
    return GrammarVerdict(_problem_of(words[0])) if failed else GrammarVerdict(grammar=grammar)


def _problem_of(words: str) -> str:
    """How fast a machine is decides whether llguidance or the limit on CPU time gives up: one answer for both."""
    return TOO_COMPLEX if any(said in words for said in _GAVE_UP) else shortened(words)


def _from_gbnf(text: str) -> str:
    """llama.cpp's notation, which vLLM's examples are written in, as Lark's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # a converter of few checks
        raise ValueError(f"it is not a GBNF grammar: {error}") from None


if __name__ == "__main__":
    main()

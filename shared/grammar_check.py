"""Whether grammars compile, found out in a process of its own: `python -m shared.grammar_check`.

A grammar of a few hundred bytes can make a compiler use minutes, gigabytes or all of the stack. There it costs
that process its life, and whoever asked hears a reason:

    check ──grammar──▶ process: limits on CPU time and memory, the usual stack
          ◀──verdict──  (it ends: the grammar is to blame, and the next one gets a new process)
"""

import contextlib
import math
import resource
import select
import subprocess
import sys
import time

import msgspec

from shared.messages import Grammar

CPU_SECONDS = 2
"""CPU time of one grammar at most; the kernel counts whole seconds."""
MEMORY = 2 << 30
"""Bytes of address space."""
ANSWER_WITHIN = 60.0
"""Seconds of waiting for a process that gets no processor."""
TOO_COMPLEX = "it is too complex to compile; make it smaller or simpler"
_GAVE_UP = ("Unable to determine if", "fuel exhausted")
"""In llguidance's words for that: they name its own bounds, and a page of its own notation."""


class Verdict(msgspec.Struct, frozen=True):
    """What became of a grammar."""

    problem: str = ""
    """Why it does not compile; empty: it does."""
    grammar: Grammar | None = None
    """The grammar to use, where it compiles: the same, or what stands for it in Lark's notation."""


class GrammarCheck:
    """Asks one process, started with the first grammar. For one thread at a time; blocks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> Verdict:
        """Whether `grammar` compiles, without any model's tokens."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._start()
        answer = _ask(process, msgspec.json.encode(grammar) + b"\n")
        if not answer:
            self.close()
            return Verdict(TOO_COMPLEX)
        return msgspec.json.decode(answer, type=Verdict)

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
            [sys.executable, "-m", "shared.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
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


def verdict_on(grammar: Grammar) -> Verdict:
    """Compiles `grammar`."""
    from llguidance import LLMatcher

    from shared.grammars import limits, shortened, source_of

    try:
        if grammar.kind == "lark" and "::=" in grammar.text:
            grammar = Grammar("lark", _from_gbnf(grammar.text))
        failed, words = LLMatcher.validate_grammar_with_warnings(source_of(grammar), limits=limits())
    except (ValueError, RecursionError) as error:  # msgspec's, llguidance's, and the converter's
        return Verdict(shortened(str(error)))
    return Verdict(_problem_of(words[0])) if failed else Verdict(grammar=grammar)


def _problem_of(words: str) -> str:
    """How fast a machine is decides whether llguidance or the limit on CPU time gives up: one answer for both."""
    from shared.grammars import shortened

    return TOO_COMPLEX if any(said in words for said in _GAVE_UP) else shortened(words)


def _from_gbnf(text: str) -> str:
    """llama.cpp's notation, which vLLM's examples are written in, as Lark's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # a converter of few checks
        raise ValueError(f"it is no GBNF grammar: {error}") from None


if __name__ == "__main__":
    main()

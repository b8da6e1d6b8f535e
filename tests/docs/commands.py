"""The commands that pages and messages tell a reader to run, and which of their words there are."""

import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from typing import Any
from unittest import mock

import typer

from services.cli.groups import app
from services.cli.serve import MODULES
from tests.docs.pages import PACKAGES, ROOT

_CODE = re.compile(r"^ *```.*?\n(.*?)^ *```$|`([^`\n]+)`", re.MULTILINE | re.DOTALL)
_CONTINUED = re.compile(r"\\\n *")
_REMARK = re.compile(r" # | {3,}(?!-)")  # what a line of a block says of its command
_OPTION = re.compile(r"--[\w-]+")
_VARIABLE = re.compile(r"\w+=.*")
_TARGET = re.compile(r"^([\w/.-]+):", re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Each `ryzanstein ...`, `python -m ...` of ours and `make ...`, as words; of blocks of code and of inline code."""
    for block, span in _CODE.findall(text):
        for line in _CONTINUED.sub(" ", block or span).splitlines():
            for words in _simple_commands(_REMARK.split(line)[0]):
                yield from _ours(words)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """What stands between a shell's operators."""
    lexer = shlex.shlex(line.replace("$(", " ; "), posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words: list[str] = []
    with contextlib.suppress(ValueError):  # an apostrophe in prose: what came before it counts
        for word in lexer:
            if set(word) <= set(";&|()<>"):
                yield words
                words = []
            else:
                words.append(word)
    yield words


def _ours(words: Sequence[str]) -> Iterator[list[str]]:
    """The command without what stands before it: variables, a prompt, `kubectl exec POD --`."""
    found = [word.strip("[]") for word in words if word not in ("$", "...") and not _VARIABLE.fullmatch(word)]
    if "--" in found and found[0] in ("kubectl", "docker"):
        found = found[found.index("--") + 1 :]
    program = found[0].rpartition("/")[2] if found else ""
    if program in ("ryzanstein", "make") and len(found) > 1:
        yield [program, *found[1:]]
    elif (
        program.startswith("python") and found[1:2] == ["-m"] and found[2:3] and found[2].partition(".")[0] in PACKAGES
    ):
        yield found[2:]


def unknown_words(words: Sequence[str]) -> list[str]:
    """Of a command: subcommands, options and targets that there are not."""
    program, *rest = words
    if program == "make":
        targets = _TARGET.findall((ROOT / "Makefile").read_text())
        return [word for word in rest if word.islower() and not word.startswith("-") and word not in targets]
    if len(rest) > 1 and rest[0] == "serve" and rest[1] in MODULES:
        return _unknown_to_help(MODULES[rest[1]], rest[2:])
    if program == "ryzanstein":
        return _unknown_to_click(typer.main.get_command(app), rest)
    return _unknown_to_help(program, rest)


def _unknown_to_click(command: Any, words: Sequence[str]) -> list[str]:
    for at, word in enumerate(words):
        if not hasattr(command, "commands") or word.startswith("-"):
            options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
            return [option for option in _options(words[at:]) if option not in options]
        if word.isupper():  # stands for any of them
            return []
        if word not in command.commands:
            return [word]
        command = command.commands[word]
    return []


def _unknown_to_help(module: str, words: Sequence[str]) -> list[str]:
    options = _options(words)
    subcommands = tuple(takewhile(lambda word: word[:1] != "-" and word.replace("-", "").islower(), words))
    return [option for option in options if option not in _options_of(module, *subcommands)] if options else []


def _options(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


@cache
def _options_of(module: str, *subcommands: str) -> set[str]:
    """What a module of ours tells of for --help."""
    printed = io.StringIO()
    arguments = mock.patch.object(sys, "argv", [module, *subcommands, "--help"])
    with warnings.catch_warnings(), arguments, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        warnings.simplefilter("ignore", RuntimeWarning)  # of a module that is imported already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return set(_OPTION.findall(printed.getvalue()))

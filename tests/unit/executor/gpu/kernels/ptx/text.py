"""A kernel's text as statements."""

import re
from typing import NamedTuple

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"(\$?[A-Za-z_][\w$]*):(?!:)\s*")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+")
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{(.*)\}", re.S)


class Statement(NamedTuple):
    """One instruction."""

    opcode: tuple[str, ...]
    """`ld.global.b32` in its parts."""
    operands: tuple[str, ...]
    """Those in braces or brackets whole."""
    guard: str
    """The predicate register; empty: always."""
    negated: bool
    text: str


class Kernel(NamedTuple):
    """What is run."""

    parameters: list[str]
    statements: list[Statement]
    labels: dict[str, int]
    """The statement that each stands before."""


def parse(ptx: str) -> Kernel:
    """The only kernel of `ptx`."""
    found = _ENTRY.search(_COMMENT.sub("", ptx))
    assert found is not None, "no kernel in this text"
    parameters = re.findall(r"\w+_param_\d+", found[2])
    statements, labels = parse_body(found[4])
    return Kernel(parameters, statements, labels)


def parse_body(body: str) -> tuple[list[Statement], dict[str, int]]:
    """Statements and labels of text without comments: names of inner blocks are taken as those of the whole."""
    statements: list[Statement] = []
    labels: dict[str, int] = {}
    for piece in body.split(";"):
        rest = _without_openings(piece)
        while found := _LABEL.match(rest):
            labels[found[1]] = len(statements)
            rest = _without_openings(rest[found.end() :])
        if rest and not rest.startswith("."):
            statements.append(_statement(rest))
    return statements, labels


def _without_openings(text: str) -> str:
    """Without what opens or closes a block, and without lines of the debugger's."""
    text = text.strip()
    while True:
        shorter = re.sub(r"^(?:[{}]\s*|\.(?:loc|file)[^\n]*(?:\n|$)\s*|\.pragma[^\n]*\n\s*)", "", text)
        if shorter == text:
            return text
        text = shorter


def _statement(text: str) -> Statement:
    guard, negated, rest = "", False, text
    if found := _GUARD.match(text):
        negated, guard, rest = found[1] == "!", found[2], text[found.end() :]
    opcode, operands = [*rest.split(None, 1), ""][:2]
    parts = tuple(part for part in re.split(r"\.|::", opcode.strip()) if part)
    return Statement(parts, tuple(operands_of(operands)), guard, negated, text)


def operands_of(text: str) -> list[str]:
    """Between the commas that stand outside of braces and brackets."""
    found, depth, begin = [], 0, 0
    for at, letter in enumerate(text + ","):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append(text[begin:at].strip())
            begin = at + 1
    return [one for one in found if one]


def inside(text: str) -> list[str]:
    """The names of `{a, b}`, or the one that `text` is."""
    return operands_of(text.strip()[1:-1]) if text.strip().startswith("{") else [text]

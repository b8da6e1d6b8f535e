"""A conversation in the terminal: prompts, commands, and what an answer looks like."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.chat_client import ChatClient
from services.cli.commands.chat import ChatOptions, Conversation, show_answer
from services.cli.ui import MarkdownPrinter, end_of_paragraph
from tests.unit.cli.test_ui import output, screen


class Client(ChatClient):
    """Answers each question with itself, twice."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", model="m")

    def ask(self, prompt: str, *, max_tokens: int | None = None, temperature: float | None = None) -> Iterator[str]:
        yield prompt
        yield f" {prompt}"
        self.messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": f"{prompt} {prompt}"}]


def converse(monkeypatch: pytest.MonkeyPatch, *prompts: str) -> tuple[Client, str]:
    """What a conversation of these prompts leaves, and what it has printed."""
    client, console = Client(), screen(80, terminal=False)
    asked = iter(prompts)
    monkeypatch.setattr(Console, "input", lambda *_: next(asked))
    try:
        Conversation(client, console, ChatOptions(None, None, plain=True)).run()
    finally:
        client.close()
    assert next(asked, None) is None, "it has ended early"
    return client, output(console)


def test_a_conversation_goes_on_until_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    client, printed = converse(monkeypatch, "Hello", "", "You", "/bye")
    assert printed == "Hello Hello\nYou You\n"
    assert len(client.messages) == 4


def test_what_the_model_is_told_first_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = converse(monkeypatch, "/system Be short.", "A", "/system Be long.", "/bye")
    assert [message["role"] for message in client.messages] == ["system", "user", "assistant"]
    assert client.messages[0]["content"] == "Be long."
    client, _ = converse(monkeypatch, "/system Be short.", "A", "/system", "/clear", "/bye")
    assert client.messages == []


def test_a_conversation_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    client, printed = converse(monkeypatch, "Grüße", f"/save {file}", "/save", f"/save {tmp_path}/none/x", "/bye")
    assert json.loads(file.read_text()) == client.messages
    assert "2 messages are in" in " ".join(printed.split())
    assert "Name the file: /save FILE." in printed
    assert "cannot be written: No such file or directory." in " ".join(printed.split())


def test_commands_are_listed_and_unknown_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client, printed = converse(monkeypatch, "/help", "/quit now", "/bye")
    for command in ("/system", "/clear", "/save", "/help", "/bye"):
        assert command in printed
    assert "There is no command /quit; /help lists them." in printed
    assert client.messages == [], "nothing of it was asked"


MARKDOWN = "# Rivers\n\nThe **Rhine** flows.\n\n```\none\n\ntwo\n```\n\n- a\n- b\n"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_answer_is_shown_as_the_markdown_that_it_is(step: int) -> None:
    console = screen(40)
    printer = MarkdownPrinter(console)
    for at in range(0, len(MARKDOWN), step):
        printer.write(MARKDOWN[at : at + step])
    printer.end()
    printed = output(console)
    assert step < len(MARKDOWN) or "**" not in printed, "what is whole is shown as it is meant"
    assert "The Rhine flows." in printed
    assert "•" in printed
    assert printed.index("one") < printed.rindex("two")


def test_control_characters_of_an_answer_do_not_steer_the_terminal() -> None:
    console = screen(40)
    printer = MarkdownPrinter(console)
    printer.write("a\x1b]0;title\x07b \x9b31m")
    printer.end()
    assert "\x1b]0" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert "a]0;titleb" in output(console)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("a\n", None),
        ("a\n\n", 2),
        ("a\nb\n\nc", 4),
        ("```\na\n\nb\n", None),
        ("```py\na\n\nb\n```\n\nc", 15),
        ("~~~\n```\n\n~~~\n\n", 13),
        ("\n\na", 1),
    ],
)
def test_a_paragraph_ends_at_an_empty_line_outside_of_code(text: str, end: int | None) -> None:
    assert end_of_paragraph(text) == end


def test_answers_are_plain_where_that_is_asked_for() -> None:
    console = screen(80)
    client = Client()
    show_answer(client, console, "**bold**", ChatOptions(None, None, plain=True))
    client.close()
    assert "**bold** **bold**" in output(console)


def test_how_far_a_long_prompt_is_stands_there_until_the_answer_comes() -> None:
    class Slow(Client):
        def ask(self, prompt: str, *, max_tokens: int | None = None, temperature: float | None = None) -> Iterator[str]:
            assert self.on_progress is not None
            self.on_progress(34816, 131072)
            yield from super().ask(prompt)

    console, client = screen(80), Slow()
    show_answer(client, console, "Hello", ChatOptions(None, None, plain=True))
    client.close()
    shown = output(console)
    assert "34,816 of 131,072 tokens, 27%" in shown
    assert "Hello Hello" in shown[shown.index("27%") :]

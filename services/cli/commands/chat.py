"""`ryzanstein chat`: one question, or prompts and answers in turn, and commands that begin with a slash."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.status import Status

from services.cli.chat_client import ChatClient
from services.cli.target import ApiKey, DataDir, Gateway, Url, gateway_of_stack, trust_of
from services.cli.ui import AnswerPrinter, MarkdownPrinter, console, say
from shared.errors import RyzansteinError

HELP = """\
/system TEXT   system prompt from now on; without TEXT none
/clear         forget the conversation
/save FILE     write the conversation there, as JSON messages
/help          this list
/bye           end, as Ctrl-D does; Ctrl-C stops an answer"""


def chat(
    prompt: Annotated[str, typer.Argument(help="A single question; without it, a conversation.")] = "",
    model: Annotated[str, typer.Option(help="Default: the first model that is served.")] = "",
    url: Url = "",
    ca: Annotated[
        str,
        typer.Option(envvar="RYZANSTEIN_CA", help="File of the authorities to trust (PEM), for an https:// gateway."),
    ] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of an answer.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", min=0, max=2)] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Show answers as plain text; a terminal renders Markdown otherwise.")
    ] = False,
    data_dir: DataDir = None,
    api_key: ApiKey = "",
) -> None:
    """Talk to a model, streamed."""
    options = ChatOptions(max_tokens, temperature, plain)
    gateway = Gateway(url) if url else gateway_of_stack(data_dir)
    client = ChatClient(
        gateway.url,
        model=model,
        session=f"chat-{os.getpid()}-{os.urandom(4).hex()}",
        api_key=api_key,
        trust=trust_of(gateway.certificate, ca),
    )
    screen = console()
    try:
        if prompt:
            show_answer(client, screen, prompt, options)
            return
        where = f"{client.choose_model()} at {gateway.url}"
        say(screen, f"{where}; /help lists commands, /bye or Ctrl-D ends, Ctrl-C stops an answer.")
        Conversation(client, screen, options).run()
    finally:
        client.close()


class ChatOptions(NamedTuple):
    """What every question of a conversation has in common."""

    max_tokens: int | None
    temperature: float | None
    plain: bool  # show answers as they are, and not as Markdown


class Conversation:
    """Reads prompts until the end of the input."""

    def __init__(self, client: ChatClient, screen: Console, options: ChatOptions) -> None:
        self._client = client
        self._screen = screen
        self._options = options
        self._over = False
        self._commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "clear": lambda _: self._client.messages.clear(),
            "save": self._save,
            "help": lambda _: self._say(HELP),
            "bye": self._bye,
        }

    def run(self) -> None:
        while not self._over:
            try:
                prompt = self._screen.input("[bold]>[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                self._screen.print()
                return
            if prompt:
                self._take(prompt)

    def _take(self, prompt: str) -> None:
        name, _, rest = prompt[1:].partition(" ")
        try:
            if not prompt.startswith("/"):
                show_answer(self._client, self._screen, prompt, self._options)
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                self._say(f"There is no command /{name}; /help lists them. A question may begin with a space.")
        except KeyboardInterrupt:
            self._screen.print("(stopped)", style="dim")
        except RyzansteinError as error:
            say(self._screen, f"error: {error}", "red")

    def _system(self, text: str) -> None:
        messages = self._client.messages
        messages[:] = [message for message in messages if message["role"] != "system"]
        if text:
            messages.insert(0, {"role": "system", "content": text})

    def _save(self, name: str) -> None:
        if not name:
            self._say("Name the file: /save FILE.")
            return
        try:
            text = json.dumps(self._client.messages, ensure_ascii=False, indent=2)
            Path(name).expanduser().write_text(text + "\n")
        except OSError as error:
            self._say(f"{name} cannot be written: {error.strerror}.")
        else:
            self._say(f"{len(self._client.messages)} messages are in {name}.")

    def _bye(self, _: str) -> None:
        self._over = True

    def _say(self, text: str) -> None:
        say(self._screen, text, "dim")


def show_answer(client: ChatClient, screen: Console, prompt: str, options: ChatOptions) -> None:
    """One question, its answer as it comes. Raises what `ChatClient.ask` does."""
    known = client.plain
    as_markdown = screen.is_terminal and not options.plain and not known
    printer = MarkdownPrinter(screen) if as_markdown else AnswerPrinter(screen)
    reading = screen.status("", spinner="dots") if screen.is_terminal else None
    if reading is not None:
        client.on_progress = partial(_show_progress, reading)
    try:
        for text in client.ask(prompt, max_tokens=options.max_tokens, temperature=options.temperature):
            if reading is not None:
                reading.stop()
            printer.write(text)
    finally:
        if reading is not None:
            reading.stop()
        printer.end()
    if client.plain and not known and screen.is_terminal:
        screen.print("(no chat template: the model completes each text by itself, without a conversation)", style="dim")


def _show_progress(reading: Status, computed: int, total: int) -> None:
    """Of a long prompt, until the first text comes."""
    reading.update(f"[dim]the prompt is read: {computed:,} of {total:,} tokens, {computed / max(1, total):.0%}[/]")
    reading.start()


def add_to(app: typer.Typer) -> None:
    app.command()(chat)

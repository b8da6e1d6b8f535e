"""Text to tokens and back, for one model."""

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import msgspec
import tokenizers

from services.gateway.core.errors import InvalidParameter
from services.gateway.tokenizer.detokenizer import (
    CONTEXT_TOKENS,
    Detokenizer,
    FilteredDetokenizer,
    StreamDetokenizer,
    TokenBytes,
    TokenTexts,
)
from services.gateway.tokenizer.encoding import INLINE, Encoding
from services.gateway.tokenizer.segments import Segments
from services.gateway.tokenizer.special_tokens import SpecialText, pieces
from services.gateway.tokenizer.templates import (
    Renderer,
    TemplateInput,
    TemplateOptions,
    Traits,
    templates_of,
    tokenizer_info,
)
from services.gateway.tokenizer.token_bound import TokenBound, TokenizerJson
from services.gateway.tokenizer.turns import TextSegment, TrainedText, TrainedTokens, pieces_of, weights_of
from services.gateway.tool_calls.parsers.tagged import without_suffix
from shared.errors import InternalError
from shared.process import give_back

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads for each core: those compute


_EACH = 64  # bytes of text that take as long as one text more
_PLAIN = TemplateOptions()

ResultT = TypeVar("ResultT")


class Rendered(NamedTuple):
    """A conversation as the text of a prompt, in pieces that are encoded apart: none has a special token that the
    template has not written."""

    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Pair(NamedTuple):
    """Two texts as one prompt."""

    tokens: list[int]
    second_segment: int  # `GenerationRequest.second_segment`


class ModelTokenizer:
    """A tokenizer of the `tokenizers` library with a chat template."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        renderer: Renderer | None = None,
        encoding: Encoding | None = None,
        *,
        special_tokens_in_messages: bool = False,
    ) -> None:
        """From the files of a `TokenizerBundle`. `renderer`: of its templates, None: in this process;
        `special_tokens_in_messages`: there the text of a special token is that token. Raises `InternalError` when
        the files are unusable."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            file = msgspec.json.decode(files["tokenizer.json"], type=TokenizerJson)
            self._renderer = renderer or _in_process(files)
            self.info = tokenizer_info(files)  # its configuration, as a JSON object
        except KeyError:
            raise InternalError("The tokenizer bundle of the model lacks tokenizer.json.") from None
        except ValueError as error:
            raise InternalError(f"The tokenizer files of the model cannot be used: {error}.") from error
        except Exception as error:  # what the library raises for a file that is not one
            raise InternalError(f"The model's tokenizer.json cannot be used: {error}.") from error
        self._encoding = encoding or Encoding()
        self._tenant = ""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = {entry.content: token for token, entry in added if entry.special}
        self._suffixed = {without_suffix(text): text for text in self._special if text != without_suffix(text)}
        self._special_text = SpecialText([] if special_tokens_in_messages else self._special)
        self._bytes = TokenBytes(self._tokenizer, byte_level="ByteLevel" in str(file.decoder))
        adds_bytes = isinstance(file.decoder, dict) and file.decoder.get("type") == "ByteLevel"
        # Of single tokens, without and with the special ones, where a text is their sum.
        self._texts = {skip: TokenTexts(self._tokenizer, skip) for skip in (False, True)} if adds_bytes else {}
        self._segments = Segments(self._tokenizer)
        self._bound = TokenBound(file, self._tokenizer)
        del file
        give_back()  # reading the file takes twice of what is kept

    def of(self, tenant: str) -> "ModelTokenizer":
        """This one, for a request of `tenant`: whose turn it is where others' texts wait too."""
        if tenant == self._tenant:
            return self
        own = object.__new__(ModelTokenizer)
        own.__dict__ = {**self.__dict__, "_tenant": tenant}
        return own

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._renderer is not None

    @property
    def traits(self) -> Traits:
        """What the chat template can do."""
        return self._renderer.traits if self._renderer else Traits()

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> Rendered:
        """The conversation as the text of a prompt. Raises `InvalidParameter`, `QueueFull`."""
        if self._renderer is None:
            raise _no_template(
                "This model has no chat template: it completes texts, and cannot hold conversations. Send a prompt to "
                "/v1/completions, or put a chat_template.jinja beside the model's files and serve it again."
            )
        conversation, mark = await self._marked(TemplateInput(messages, tools, options or _PLAIN))
        return Rendered(pieces(await self._renderer.render(conversation, self._tenant), mark))

    async def _marked(self, conversation: TemplateInput) -> tuple[TemplateInput, str]:
        """The conversation for its template, and what its special texts are marked with."""
        messages, tools, options = conversation
        size = 0
        for message in messages:
            size += _EACH + len(message.get("content") or "")
        marked = await self._beside(size, lambda: self._special_text.marked(messages, tools, options.variables))
        if not marked.mark:
            return conversation, ""
        options = msgspec.structs.replace(options, variables=marked.variables)
        return TemplateInput(marked.messages, marked.tools, options), marked.mark

    async def render_turns(self, conversation: TemplateInput, trained: Sequence[int]) -> list[TrainedText]:
        """The texts in which the assistant's messages `trained` (their indices) are learned. Raises
        `InvalidParameter`, `QueueFull`."""
        if self._renderer is None:
            raise _no_template(
                "This model has no chat template, so it learns no conversations: send lines of 'prompt' and "
                "'completion'."
            )
        conversation, mark = await self._marked(conversation)
        found = await self._renderer.turns(conversation, trained, self._tenant)
        return [TrainedText(pieces_of(turns, mark, self._special), False, turns.unlike_prompt) for turns in found]

    async def encode_trained(self, texts: Sequence[TrainedText], end: int | None) -> list[TrainedTokens]:
        """Each text with what is trained of it; beside the event loop, however small they are. `end`: the token that is
        put behind a text which ends with no special token; None: none is. Raises `QueueFull`."""
        size = sum(len(piece.text) + _EACH for text in texts for piece in text.pieces)
        return await self._beside(max(size, INLINE + 1), lambda: self._encode_trained(texts, end))

    def _encode_trained(self, texts: Sequence[TrainedText], end: int | None) -> list[TrainedTokens]:
        found = []
        specials = {*self._special.values(), end}
        for text in texts:
            tokens, weights = list[int](), bytearray()
            for piece in text.pieces:
                encoding = self._tokenizer.encode_batch([piece.text], add_special_tokens=text.special)[0]
                ids = encoding.ids
                end_of = functools.partial(_end_of, encoding, len(ids), len(piece.text))
                weights += weights_of(len(ids), end_of, piece.spans)
                tokens += ids
            if end is not None and text.ends_trained and tokens[-1:] and tokens[-1] not in specials:
                tokens.append(end)
                weights.append(1)
            found.append(TrainedTokens(tokens, bytes(weights)))
        return found

    async def encode_rendered(self, rendered: Rendered) -> list[int]:
        """The tokens of a rendered conversation. Raises `QueueFull`."""
        texts = rendered.pieces
        if len(texts) == 1 and len(texts[0]) <= INLINE:  # nearly always
            return self._segments.encode(texts[0])
        found = await self.encode_all(texts, special=False)
        return [token for piece in found for token in piece]

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A plain text as a prompt, with the special tokens that the model wants around it where `special`. Raises
        `QueueFull`."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """As `encode`, each of them."""
        size = sum(map(len, texts)) + _EACH * (len(texts) - 1)
        return await self._beside(size, lambda: self._encode(texts, special))

    async def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Each of `texts` is given in parts, every other one, from the second on, a client's: there the text of a
        special token is none. Nothing is put around them. Raises `QueueFull`."""
        size = sum(map(len, chain.from_iterable(texts))) + _EACH * len(texts)
        return await self._beside(size, lambda: self._encode_parts(texts))

    def _encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        cut = [self._special_text.joined(parts) for parts in texts]
        found = iter(self._encode(list(chain.from_iterable(cut)), special=False))
        return [[token for _ in parts for token in next(found)] for parts in cut]

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """Two texts as one prompt each, as the model's tokenizer joins them. Raises `QueueFull`."""
        size = sum(len(first) + len(second) for first, second in pairs) + _EACH * len(pairs)
        return await self._beside(size, lambda: self._encode_pairs(pairs))

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        found = self._tokenizer.encode_batch_fast(list(pairs), add_special_tokens=True)
        segments = [encoding.type_ids for encoding in found]
        return [
            Pair(encoding.ids, kinds.index(1) if 1 in kinds else 0)
            for encoding, kinds in zip(found, segments, strict=True)
        ]

    def _encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """In a batch even alone, as `Segments` does."""
        if not special:
            return [self._segments.encode(text) for text in texts]
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [encoding.ids for encoding in found]

    async def _beside(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        return await self._encoding.run(size, work, self._tenant)

    def fewest_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, by its size; 0: that is not known."""
        return self._bound.fewest_tokens(text)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `tokens`, all at once: no more of them than a context has."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    async def decode_many(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `tokens`, however many. Raises `QueueFull`."""

        def work() -> str:  # in a batch, as `_encode`
            return self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0]

        return await self._beside(len(tokens), work)

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """What the vocabulary calls each of `tokens`; empty for one that it does not have."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """For an output that follows `prompt` (empty: that begins a new text). `keep`: special tokens that are
        shown in any case."""
        if skip_special_tokens and (shown := self.specials(keep)):
            hidden = frozenset(self._special.values()) - frozenset(shown.values())
            return FilteredDetokenizer(self.detokenizer([], skip_special_tokens=False), hidden)
        if (texts := self._texts.get(skip_special_tokens)) is not None:
            return StreamDetokenizer(self._tokenizer, [], skip_special_tokens, texts)
        context = list(prompt[-CONTEXT_TOKENS:])
        if self._tokenizer.decode(context, skip_special_tokens=skip_special_tokens).endswith("\ufffd"):
            context = []  # it ends within a character: the decoder could not tell it from the output
        return StreamDetokenizer(self._tokenizer, context, skip_special_tokens)

    def specials(self, texts: Collection[str]) -> dict[str, int]:
        """Those of `texts` that are special tokens, with their ids; also under names that end with a checkpoint's own
        suffix (`<tool_calls:opensource>`)."""
        found = (name for text in texts for name in (text, self._suffixed.get(text, "")))
        return {name: self._special[name] for name in found if name in self._special}

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; part of a character, perhaps."""
        return self._bytes.of(token)


def _no_template(message: str) -> InvalidParameter:
    return InvalidParameter(message, param="messages", reason="no_chat_template")


def _end_of(encoding: tokenizers.Encoding, count: int, size: int, token: int) -> int:
    """The character of a text of `size` behind one of its tokens. Asked for a few of them: a list of all offsets would
    hold the interpreter for long. What is put around the text is at its begin or its end."""
    place = encoding.token_to_chars(token)
    if place is not None:
        return place[1]
    return 0 if 2 * token < count else size


def _in_process(files: Mapping[str, bytes]) -> Renderer | None:
    """Raises ValueError."""
    templates = templates_of(files)
    if templates is None:
        return None
    from services.gateway.tokenizer.chat_template import InProcess  # jinja2, which a gateway has in processes apart

    return InProcess(templates)


class StubTokenizer:
    """For the stub engine: a token is a byte, text is Latin-1, a conversation its contents line by line; before them
    the variables that a template of a model that reasons looks at."""

    chats = True
    info = b'{"tokenizer_class":"StubTokenizer"}'

    def __init__(self, *, reasons: bool = False) -> None:
        """`reasons`: it stands for such a model's."""
        variables = frozenset(("reasoning_effort", "verbosity")) if reasons else frozenset[str]()
        self.traits = Traits(variables=variables)

    def of(self, tenant: str) -> "StubTokenizer":
        """It has no queue."""
        return self

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions | None = None,
    ) -> Rendered:
        given = options.variables if options is not None else {}
        text = "".join(f"{name}: {given[name]}\n" for name in sorted(self.traits.variables & given.keys()))
        text += "".join(f"{message['content']}\n" for message in messages)
        return Rendered([text[:-1] if options is not None and options.continue_final else text])

    async def render_turns(self, conversation: TemplateInput, trained: Sequence[int]) -> list[TrainedText]:
        texts = [f"{message['content'] or ''}\n" for message in conversation.messages[: max(trained) + 1]]
        ends = list(accumulate(map(len, texts)))
        spans = [(ends[index] - len(texts[index]), ends[index]) for index in sorted(trained)]
        return [TrainedText([TextSegment("".join(texts), spans)])]

    async def encode_trained(self, texts: Sequence[TrainedText], end: int | None) -> list[TrainedTokens]:
        pieces = [piece for text in texts for piece in text.pieces]
        found = [await self.encode(piece.text) for piece in pieces]
        return [
            TrainedTokens(tokens, bytes(weights_of(len(tokens), lambda token: token + 1, piece.spans)))
            for tokens, piece in zip(found, pieces, strict=True)
        ]

    async def encode_rendered(self, rendered: Rendered) -> list[int]:
        return await self.encode(rendered.text)

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode("latin-1", errors="replace"))

    async def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        return [await self.encode(text) for text in texts]

    async def encode_parts(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        return await self.encode_all(list(map("".join, texts)))

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """Line by line."""
        return [
            Pair(await self.encode(f"{first}\n{second}"), len(await self.encode(first)) + 1) for first, second in pairs
        ]

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    async def decode_many(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.decode(tokens, skip_special_tokens=skip_special_tokens)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token & 0xFF for token in tokens).decode("latin-1")

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        return [chr(token & 0xFF) for token in tokens]

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> Detokenizer:
        return _StubDetokenizer()

    def specials(self, texts: Collection[str]) -> dict[str, int]:
        return {}

    def token_bytes(self, token: int) -> bytes:
        return chr(token & 0xFF).encode()


Tokenizer = ModelTokenizer | StubTokenizer  # a model's


class _StubDetokenizer:
    def flush(self) -> str:
        return ""

    def feed(self, tokens: Sequence[int]) -> str:
        return bytes(token & 0xFF for token in tokens).decode("latin-1")

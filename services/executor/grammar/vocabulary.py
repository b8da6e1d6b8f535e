"""A model's tokens, as grammars see them: the bytes that each stands for, and which end a text."""

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from shared.errors import InvalidGrammar
from shared.messages import ModelCard, TokenizerBundle


class Vocabulary:
    """Made once per ring: it takes a fifth of a second for 50,000 tokens, and the interpreter with it."""

    def __init__(self, tokenizer: LLTokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        """Tokens that the model has logits for."""
        self.words = (tokenizer.vocab_size + 31) // 32
        """32-bit words of a mask."""
        self.eos = frozenset(token for token in tokenizer.eos_tokens if token < size)

    @classmethod
    def of(cls, card: ModelCard, bundle: bytes) -> "Vocabulary":
        """From what gateways are told of the model. Raises `InvalidGrammar` when its tokenizer is not understood."""
        if not bundle:
            tokens = TokenizerWrapper(_Bytes(card))
            return cls(LLTokenizer(tokens, n_vocab=card.vocab_size, slices=[]), card.vocab_size)
        text = msgspec.msgpack.decode(bundle, type=TokenizerBundle).files["tokenizer.json"].decode()
        eos = card.eos_token_ids or None  # None: as the tokenizer itself says
        try:
            try:
                tokenizer = LLTokenizer(text, n_vocab=card.vocab_size, eos_token=eos)
            except ValueError:  # it has more tokens than the model
                tokenizer = LLTokenizer(text, eos_token=eos)
        except Exception as error:  # the library raises what its parts raise
            raise InvalidGrammar(
                f"This model's tokenizer cannot be used for structured output ({error}); leave the format of the "
                "answer open."
            ) from None
        return cls(tokenizer, card.vocab_size)


class _Bytes:
    """The stub's tokens: a token is a byte."""

    bos_token_id = None

    def __init__(self, card: ModelCard) -> None:
        self.eos_token_id = card.eos_token_ids[0] if card.eos_token_ids else 0
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [bytes([byte]) for byte in range(card.vocab_size)]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

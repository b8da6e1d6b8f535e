"""The examples of one file as they are learned, and what `auto` comes to once it is known how many there are. Pure.

epochs                     3; more for fewer than 34 examples, so that about a hundred are seen; fewer beyond 8,333,
                           so that no more than 25,000 are (OpenAI's own rule, from its cookbook)
batch_size                 0.2% of the examples, from 1 to 32; one for each replica at least
learning_rate_multiplier   1
beta                       0.1 (of DPO)
alpha                      twice the rank
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from services.gateway.intake.fine_tuning.examples import check_context, check_trained
from services.gateway.tokenizer.turns import TrainedTokens
from shared.messages.training import Examples, Hyperparameters, TrainingMethod

_EPOCHS = 3
_MOST_EPOCHS = 25
_LEAST_SEEN, _MOST_SEEN = 100, 25_000  # examples in all epochs together
_SHARE = 0.002
_MOST_BATCH = 32
_BETA = 0.1


class Dataset:
    """Fed with the tokens of its lines, in their order."""

    def __init__(self, method: TrainingMethod, context: int, max_tokens: int, *, truncate: bool) -> None:
        """`context`: tokens that the model reads; `max_tokens`: that the job wants of an example at most, 0: as many;
        `truncate`: longer ones are cut at their end."""
        self._paired = method == "dpo"
        self._most = min(context, max_tokens or context)
        self._set_by_job = 0 < max_tokens <= context
        self._truncate = truncate
        self._tokens, self._weights, self._lengths = bytearray(), bytearray(), array("I")
        self._seen: set[int] = set()  # eight bytes of each line's hash
        self.lines = 0
        self.repeated = 0  # lines that stand in the file before
        self.cut = 0
        # What prompts end with and examples do not show, as the first that was unlike has it.
        self.unlike_prompt = ""

    @property
    def examples(self) -> int:
        """Of DPO: pairs. A conversation may be several: see `turns.py`."""
        return len(self._lengths) // (2 if self._paired else 1)

    @property
    def tokens(self) -> int:
        return len(self._weights)

    @property
    def trained(self) -> int:
        """Tokens that a loss is taken of."""
        return self._weights.count(1)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(self._lengths, default=0)

    def add(self, data: bytes, texts: Sequence[TrainedTokens], unlike_prompt: str = "") -> None:
        """The texts of a line. Raises `InvalidParameter`; then nothing of it is kept."""
        kept = [self._checked(text) for text in texts]
        trained = [text for text in kept if any(text.weights)]
        if self._paired or not trained:
            for text in kept:
                check_trained(text.weights, cut=len(text.weights) == self._most)
        else:
            kept = trained
        self.cut += any(len(text.tokens) > self._most for text in texts)
        for text in kept:
            self._tokens += array("i", text.tokens).tobytes()
            self._weights += text.weights
            self._lengths.append(len(text.tokens))
        digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
        self.repeated += digest in self._seen
        self._seen.add(digest)
        self.lines += 1
        self.unlike_prompt = self.unlike_prompt or unlike_prompt

    def _checked(self, text: TrainedTokens) -> TrainedTokens:
        if not self._truncate:
            check_context(len(text.tokens), self._most, set_by_job=self._set_by_job)
        return TrainedTokens(text.tokens[: self._most], text.weights[: self._most])

    def packed(self) -> Examples:
        """As hosts read them."""
        return Examples(bytes(self._tokens), bytes(self._weights), self._lengths.tobytes())


# --- auto ---------------------------------------------------------------------------------------


def chosen(given: Hyperparameters, method: TrainingMethod, examples: int) -> Hyperparameters:
    """`given` without anything that is `auto`. `examples`: of DPO pairs; at least one."""
    return msgspec.structs.replace(
        given,
        epochs=given.epochs or epochs_for(examples),
        batch_size=given.batch_size or batch_size_for(examples, given.replicas),
        learning_rate_multiplier=given.learning_rate_multiplier or 1.0,
        beta=given.beta or (_BETA if method == "dpo" else 0.0),
        alpha=given.alpha or 2.0 * given.rank,
    )


def epochs_for(examples: int) -> int:
    """From 1 to 25."""
    if examples * _EPOCHS < _LEAST_SEEN:
        return min(_MOST_EPOCHS, _LEAST_SEEN // examples)
    if examples * _EPOCHS > _MOST_SEEN:
        return max(1, _MOST_SEEN // examples)
    return _EPOCHS


def batch_size_for(examples: int, replicas: int = 1) -> int:
    """From 1 to 32, and no more than there are examples."""
    share = min(_MOST_BATCH, max(1, round(examples * _SHARE)))
    return max(1, min(examples, max(share, replicas)))

"""What one process trains, how, and what it says of it."""

import msgspec

SEED = 7
"""Of the examples' order, and of factors."""


class Task(msgspec.Struct, frozen=True):
    """One process of a comparison."""

    way: str
    """Its name."""
    side: str
    """Who trains: `peft`, `ours`, or `trainer`, which is ours as a job runs it."""
    model: str
    """Directory of a bf16 checkpoint."""
    weights: str
    """What the base is kept as: bf16, q4_k, nf4, ..."""
    recompute: bool = True
    """Whether activations are computed again in the backward pass (gradient checkpointing); ours always are."""
    packs: bool = True
    master: bool = True
    """Whether the factors of LoRA are in fp32."""
    rank: int = 16
    batch: int = 8
    """Examples of a step."""
    examples: int = 32
    threads: int = 2
    cache: str = ""
    """Directory of packed weights."""


class Result(msgspec.Struct, frozen=True):
    """Of the steps after the first one."""

    tokens: int
    """That examples have: padding is none."""
    seconds: float
    loss: float
    """Mean of the steps."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

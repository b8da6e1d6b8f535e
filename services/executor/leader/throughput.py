"""How fast a ring computes, measured by its own steps: what schedulers reckon waiting times with.

One step in which the whole process was held up says nothing of the next: a step counts for `OUTLIER` times the
average at most, so that a ring that is slower for good is known after some steps and not after one.

A step takes about

    step_seconds + prompt tokens / prompt_tokens_per_second

Both are averages that forget: a step weighs half as much when `HALF_LIFE` later ones of its kind have been seen.
"""

HALF_LIFE = 32
"""Steps."""
_KEEP = 0.5 ** (1 / HALF_LIFE)
OUTLIER = 4.0
ENOUGH = 8
"""Steps of a kind, since the ring last rested, before its speed is told: what one of them says may be chance, and
a ring that chance has made look slow would not be given the work that shows it."""
FASTEST = 1e9
"""Prompt tokens per second that are told at most: an engine that computes nothing has no speed."""


class Pace:
    """Two running averages. No clock: the time of each step comes in."""

    def __init__(self) -> None:
        self._steps = self._seconds = 0.0
        self._prompt_tokens = self._prompt_seconds = 0.0
        self._seen = self._prompts_seen = 0

    def rest(self) -> None:
        """The ring has no work: what was measured does not say how it will be then."""
        self._seen = self._prompts_seen = 0

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """A step has taken `seconds` and computed so many tokens of prompts."""
        if prompt_tokens > 0:
            beyond = max(0.0, seconds - self._step)
            if self._prompt_tokens:
                usual = prompt_tokens * self._prompt_seconds / self._prompt_tokens
                beyond = min(beyond, OUTLIER * (usual + self._step))
            self._prompts_seen += 1
            self._prompt_tokens = self._prompt_tokens * _KEEP + prompt_tokens
            self._prompt_seconds = self._prompt_seconds * _KEEP + beyond
        else:
            self._seen += 1
            usual = self._step or seconds
            self._steps = self._steps * _KEEP + 1
            self._seconds = self._seconds * _KEEP + min(seconds, OUTLIER * usual)

    def expected(self, prompt_tokens: int) -> float:
        """Seconds that a step with so many prompt tokens usually takes; 0 while too little was seen."""
        if not self._step or self._seen < ENOUGH:
            return 0.0
        if not prompt_tokens:
            return self._step
        if self._prompts_seen < ENOUGH or not self._prompt_tokens:
            return 0.0
        return self._step + prompt_tokens * self._prompt_seconds / self._prompt_tokens

    @property
    def step_seconds(self) -> float:
        """What a step without prompt tokens takes; 0 while too little was seen."""
        return self._step if self._seen >= ENOUGH else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """How fast prompts are computed beyond that; 0 while too little was seen."""
        if self._prompts_seen < ENOUGH or not self._prompt_tokens:
            return 0.0
        return min(FASTEST, self._prompt_tokens / max(self._prompt_seconds, 1e-12))

    @property
    def _step(self) -> float:
        return self._seconds / self._steps if self._steps else 0.0

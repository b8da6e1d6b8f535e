"""The stub engine behind the batcher, with grammars: what a ring puts out, without NATS."""

from services.executor.core.engine import GrammarFailed
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Entries, Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.drafts.proposers.catalog import PROPOSERS
from services.executor.structured_output import GrammarCompiler, GrammarState, GrammarWork, Vocabulary
from services.executor.worker.stub import STUB_EOS_TOKEN, StubEngine, StubSettings
from shared.messages import GenerationRequest, Grammar, ModelCard, SamplingParams, TokenEntry

CARD = ModelCard("stub", 8192, 256, [STUB_EOS_TOKEN], "", 0)


def byte_compiler() -> GrammarCompiler:
    """For the stub's tokens, which are bytes."""
    return GrammarCompiler(Vocabulary.of(CARD, b""))


def ask(
    grammar: Grammar | None,
    name: str = "a",
    *,
    seed: int = 1,
    max_tokens: int = 400,
    generated: list[int] | None = None,
    attempt: int = 0,
    stop_token_ids: list[int] | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        name,
        "r",
        "m",
        "c",
        [1, 2, 3],
        max_tokens,
        SamplingParams(seed=seed),
        [STUB_EOS_TOKEN] if stop_token_ids is None else stop_token_ids,
        generated=generated or [],
        attempt=attempt,
        grammar=grammar,
    )


class GuidedRing:
    """Adds requests with their grammars compiled at once, and runs steps."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        settings: StubSettings | None = None,
        *,
        drafts: int = 0,
        work: GrammarWork | None = None,
        engine: type[StubEngine] = StubEngine,
    ) -> None:
        """`drafts`: of a sequence at most. `work`: begins masks before steps; else the sampler computes them."""
        self.engine = engine(settings or StubSettings(num_blocks=640), lambda seconds: None)
        spec, limits = self.engine.load(lambda *_: None), BatchSettings(max_drafts=drafts)
        self.batcher = Scheduler(spec, limits, drafter=Drafter(spec, limits, PROPOSERS))
        self.compiler = compiler
        self.work = work
        self.steps = 0
        self.log: list[TokenEntry] = []

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            assert self.batcher.add(request) is None
            if request.grammar is not None:
                self.batcher.release(request, self.compiler.start(request))

    def step(self) -> bool:
        """False when there is nothing to compute. A token costs next to nothing, so that what may be right is
        drafted."""
        if (round_ := self.batcher.plan_drafts()) is not None:
            found = self.engine.draft(round_[0], [row.sampling for row in round_[1]])
            self.batcher.take_drafts(found, 0.001)
        scheduled = self.batcher.schedule()
        if scheduled is None:
            self.take(self.batcher.take_entries())
            return False
        plan, rows = scheduled
        self.steps += 1
        samples = [row.sampling for row in rows]
        if self.work is not None:
            self.work.begin_masks(samples)
        try:
            sampled = self.engine.execute(plan, samples)
            entries = self.batcher.update(sampled, 1 + 0.001 * len(plan.token_ids))
        except GrammarFailed as error:
            entries = self.batcher.fail_step(error, error.rows)
        self.batcher.check()
        self.take(entries)
        return True

    def run(self) -> None:
        while self.step():
            pass

    def take(self, entries: Entries) -> None:
        self.log += entries.get("c", [])

    def tokens(self, name: str = "a") -> list[int]:
        return [token for entry in self.log if entry.generation_id == name for token in entry.tokens]

    def text(self, name: str = "a") -> str:
        return bytes(token for token in self.tokens(name) if token != STUB_EOS_TOKEN).decode()

    def last(self, name: str = "a") -> TokenEntry:
        return [entry for entry in self.log if entry.generation_id == name][-1]


def state_of(compiler: GrammarCompiler, grammar: Grammar, *tokens: int, eos: bool = True) -> GrammarState:
    stops = [STUB_EOS_TOKEN] if eos else []
    return compiler.start(ask(grammar, generated=list(tokens), stop_token_ids=stops))

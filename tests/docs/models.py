"""docs/models.md: the architectures that are served, and those that are not."""

from textwrap import fill

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.executor.model.catalogue import (
    ENCODERS,
    LISTED_ELSEWHERE,
    REFUSED,
    SERVED,
    TEXT_ALONE,
    refusal_of,
)
from services.executor.model.encoders.families import ONE_RANK

PROVEN_RANKS = (1, 2, 3)
PROVEN_ERROR = 1e-4
"""Largest absolute difference of any logit from transformers', float32."""

_BY_CONFIGURATION: tuple[tuple[str, str], ...] = (
    ("encoder-decoders, and decoders with cross-attention", "there is no encoder"),
    ("images and sound, for models that take them", "their text model alone is served"),
    (
        "weights quantized otherwise than docs/quantization.md lists",
        "what their codes stand for is not known here",
    ),
    (
        "attention that looks ahead (`use_bidirectional_attention`), but for embeddings by Gemma 3 (EmbeddingGemma)",
        "a token is computed once, when it comes",
    ),
    ("layer types that the architecture is not proven with", "what such a layer keeps is not known"),
    (
        "contexts beyond `keep_window_size` (Doge: 2048 tokens)",
        "which keys are attended to would then follow from all of them",
    ),
    (
        "configurations that contradict themselves (heads that do not divide, layers that do not exist)",
        "they are damaged, or of another model",
    ),
    ("more ranks than attention heads", "a rank needs a head; use a smaller `--tp`"),
)

_LATENT = (
    "Latent attention: each rank keeps the whole line of a token (the latent and the rotated part of its key) and",
    "computes its own heads. On CPUs the native kernels compute `axk1`, `deepseek_v2`, `deepseek_v3`, `glm4_moe_lite`,",
    "`minicpm3`, `mistral4` and `youtu`, prompts by absorbed products too, so that a token's bits do not depend on its",
    "step; PyTorch attends in the others, and on GPUs.",
    "",
    "An indexer's heads and keys are whole on every rank, and all ranks choose the same tokens: those of the highest",
    "scores, of ties the earliest. Texts of no more tokens than it chooses are attended to as without it. Scores are",
    "PyTorch's sums: where two nearly tie, other texts in the batch may decide. They tie exactly, at 0, where a key's",
    "products with all heads are negative; transformers leaves that choice to `topk`, whose order changes with the",
    "length of a row, so that its texts with its cache differ from those without, and from ours.",
)

_KINDS = (
    (
        "full",
        "2 x KV heads x 16 x head width in each block",
        "by KV heads; where ranks are more, several have the same one",
        "bf16, int8, fp8",
    ),
    ("sliding", "the same: tokens beyond the window stay, and are not read", "as full", "bf16, int8, fp8"),
    ("chunked", "the same: tokens of earlier chunks stay, and are not read", "as full", "bf16, int8, fp8"),
    (
        "latent",
        "1 x 16 x (latent + rotated part of the key) in each block",
        "whole on every rank",
        "bf16, int8, fp8",
    ),
    (
        "indexed",
        "as latent (MiniMax M3: as full), and 1 x 16 x an indexer's key",
        "as latent or full; the indexer's keys whole on every rank",
        "bf16, int8, fp8, the indexer's keys too",
    ),
    ("shared", "nothing: the pages of another layer are read", "as that layer", "as that layer"),
    (
        "recurrent",
        "a slot for each running sequence: the convolution's window in the model's dtype, the state in fp32",
        "by heads or channels",
        "none: slots and their snapshots are kept as computed",
    ),
    ("hybrid", "a block as full, and a slot", "as full and recurrent", "of the blocks: bf16, int8, fp8"),
    (
        "compressed",
        "a line of every few tokens, and an indexer's key of each, in blocks; in a slot the window of the last tokens, "
        "and what the next line is made of",
        "whole on every rank",
        "of the blocks: bf16, int8, fp8",
    ),
)
"""(kind, what is kept, how it is cut over the ranks, how full blocks are compressed)."""
_IN_BLOCKS = "whole blocks of 16 tokens"
_AT_SNAPSHOTS = (
    "up to the last snapshot: at the end of a prompt, where prompts part, and every 4 to 128 blocks"
)
_MOVES = (
    (
        "full, sliding, chunked, latent, indexed, shared",
        _IN_BLOCKS,
        "blocks, as they are stored",
        "gives its blocks up, spilled where that is set, and computes again what is gone",
    ),
    (
        "recurrent, hybrid, compressed",
        _AT_SNAPSHOTS,
        "blocks, and snapshots in blocks",
        "gives its slot up, and goes on from its last snapshot that is there",
    ),
)
"""(kinds, prefixes and sessions, what is spilled and handed over, a preempted sequence)."""
_EXACT = (
    (
        "full, sliding, shared, latent, recurrent (gated delta rule): models that the native CPU kernels compute",
        "bit for bit",
        "bit for bit",
    ),
    (
        "full, sliding: on GPUs with `--batch-invariant`",
        "bit for bit",
        "bit for bit, on GPUs of one kind",
    ),
    (
        "every kind: PyTorch on CPUs, and GPUs without `--batch-invariant`",
        "but for the last bits of sums, which follow the shapes of a step",
        "the same greedy text in fp32, unless two tokens nearly tie; in bf16 texts may part",
    ),
)
"""(what computes which kinds, beside other texts and however steps are cut, after a ring was killed)."""
_SHOWN = (
    ("formats and cuts", "`tests/unit/executor/model/test_architectures.py`, at 1, 2 and 3 ranks"),
    (
        "the tokens that an indexer chooses, in texts of several times as many",
        "`tests/unit/executor/model/test_indexed_attention.py`: indexer and attention in float64, by prompts in one "
        "piece, chunks, decodes, on two ranks, of compressed blocks",
    ),
    (
        "compression; what spilling and hand-over move, read bit for bit as before",
        "`tests/unit/executor/model/test_kinds_of_state.py`, each kind in bf16, int8 and fp8",
    ),
    (
        "prefixes, sessions, spilling, hand-over and preemption, in any order",
        "`tests/unit/executor/scheduler/test_batching_properties.py`, `test_state_slots.py` beside it, "
        "`tests/unit/executor/kv_transfer/test_exchange.py`, with blocks alone and with slots",
    ),
    (
        "bit for bit",
        "`tests/unit/executor/cpu/test_exact.py`, `tests/unit/executor/gpu/test_batch_invariant.py`",
    ),
    (
        "the text after a ring was killed, each kind",
        "`tests/chaos/test_kinds_of_state.py`, real processes in fp32; `test_real_engine.py` with native kernels",
    ),
    ("state that does not fit", "`tests/unit/executor/kv_cache/test_capacity.py`"),
)


def _by_kind() -> list[str]:
    """The tables of what holds of each kind of state."""
    return [
        "## By kind of state",
        "",
        "What a layer keeps of a sequence, on each rank; blocks have 16 tokens, or `RYZANSTEIN_BLOCK_SIZE`:",
        "",
        *_table(("kind", "kept", "over ranks", "`--kv-dtype`"), _KINDS),
        "",
        "`--kv-dtype auto` is int8 where compressed blocks are read as fast: the native CPU kernels, and on GPUs with",
        "Triton in bf16 where all layers keep keys and values of one shape. Else blocks stay as computed.",
        "",
        *_table(
            ("kind", "prefixes and sessions", "spilled and handed over", "a preempted sequence"),
            _MOVES,
        ),
        "",
        "Rings give blocks to each other whose sizes and codecs are the same. Where a model has slots, drafts",
        "(`--speculation`) take some for the states behind them ([which and how",
        "many](performance.md#drafts-of-models-with-recurrent-state)).",
        "",
        *_table(("computed by", "beside other texts", "after a ring was killed"), _EXACT),
        "",
        *_table(("what", "shown by"), _SHOWN),
        "",
        "State that does not fit is refused before weights are read: where `RYZANSTEIN_KV_MEMORY`, or what is free",
        "less the weights, would not hold one sequence of `--context-length`, or the slots of one and a snapshot.",
        "",
    ]


def _table(head: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> list[str]:
    ruler = ("---",) * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows)]


def _text_alone() -> list[str]:
    types = ", ".join(f"`{name}`" for name in sorted(TEXT_ALONE))
    return fill(
        "Models that take images or sound too are served as their text model where that stands above and the type "
        f"of the whole is one of {types}.",
        120,
        break_on_hyphens=False,
    ).splitlines()


_LENGTHS = (
    "## Length of texts",
    "",
    "A model is served with texts as long as its `max_position_embeddings`, or `--context-length`. Rotary positions",
    "that follow the length of a text are fixed when the model is loaded, by the longest text that it is served with,",
    "as in vLLM.",
    "",
    *(
        f"| {kind} | {positions} | {longest} |"
        for kind, positions, longest in (
            ("rotary positions", "frequencies", "`--context-length` at most"),
            ("---", "---", "---"),
            (
                "LongRoPE (Phi-3 128k, Phi-3.5, Phi-4-mini)",
                "the long factors where the context is longer than `original_max_position_embeddings`, else the short",
                "`max_position_embeddings`",
            ),
            (
                "dynamic NTK",
                "those of the context where it is longer than `max_position_embeddings`, else the plain ones",
                "`factor` times `max_position_embeddings`",
            ),
            (
                "YaRN",
                "as the configuration says, for any context",
                "`factor` times `original_max_position_embeddings`, where that is more",
            ),
            ("linear, Llama 3, proportional", "as the configuration says, for any context", "the default"),
        )
    ),
    "",
    "A LongRoPE model for short texts alone does best with `--context-length` at its original length (4096), which",
    "takes less memory too. Groups with different frequencies have different fingerprints and give no blocks to each",
    "other. transformers takes the short factors for each batch of short texts, so its texts differ from those of a",
    "long context; of a PhiMoE it takes them for long texts too, where vLLM and we take the long ones.",
    "",
)


def _encoders() -> list[str]:
    lines = [
        "## Encoders",
        "",
        "Models that read a text in both directions, for embeddings and, with a sequence-classification head, for",
        "classes and reranking ([embeddings](embeddings.md)). Each is proven by tests/unit/executor/model/encoders: a",
        "small random model computes texts of several lengths in one step, and states and logits are those of",
        f"transformers for one text at a time, in fp32, within {PROVEN_ERROR}; by one rank and by two, or by one where",
        "the table says so.",
        "",
        "| architecture | `model_type` | for example | shown | ranks |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.title} | `{name}` | {row.examples} | {row.shown} | {'1' if name in ONE_RANK else '1, 2'} |"
        for name, row in ENCODERS.items()
    ]
    lines.append(
        "| Gemma 3 (text) | `gemma3_text` | EmbeddingGemma | looks ahead; windows to both sides | 1, 2 |"
    )
    return [*lines, ""]


def page() -> str:
    ranks = f"{', '.join(map(str, PROVEN_RANKS[:-1]))} and {PROVEN_RANKS[-1]}"
    served = len(set(SERVED) - LISTED_ELSEWHERE)
    causal = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    refused = sum(len(row.model_types) for row in REFUSED)
    lines = [
        "# Models",
        "",
        "<!-- Made by `python -m tests.docs`; a test fails when it is stale. -->",
        "",
        f"{served} of transformers' {causal} causal types are served, over any number of ranks up to the number of",
        f"attention heads; the other {refused} are [refused](#refused), each with its reason. Each that is served is",
        "proven by `tests/unit/executor/model/test_architectures.py`: a small model with random weights runs a prefill",
        "in chunks and 16 decode steps over the paged cache, beside other sequences, and every token's logits are",
        f"compared with transformers' own forward of the whole text: at {ranks} ranks none differs by {PROVEN_ERROR}",
        "in fp32. Heads, widths and vocabulary do not divide by the ranks. A run in bf16 shows that it works as well.",
        "",
        "| architecture | `model_type` | for example | shown |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.title} | `{name}` | {row.examples} | {row.shown} |"
        for name, row in sorted(SERVED.items(), key=lambda item: item[1].title.lower())
    ]
    lines += [
        "",
        "How each is split stands in `services/executor/model/parallel/plans.py`; what a plan does not name is "
        "replicated.",
        "",
        *_LATENT,
        "",
        *_text_alone(),
        "",
        *_by_kind(),
        *_LENGTHS,
        *_encoders(),
        "## Refused",
        "",
        "Refused at load, with the reason, before a byte of the weights is read:",
        "",
        "| architectures | why: the architecture ... |",
        "| --- | --- |",
    ]
    lines += [f"| {', '.join(f'`{name}`' for name in row.model_types)} | {row.because} |" for row in REFUSED]
    lines += [f"| all others | {refusal_of('')} |", "", "And of the architectures that are served:", ""]
    lines += ["| what | why |", "| --- | --- |"]
    lines += [f"| {what} | {why} |" for what, why in _BY_CONFIGURATION]
    lines += [
        "",
        "`ryzanstein models list --supported` prints these tables, with the kinds of state that layers keep; `--json`",
        "for programs. `ryzanstein models inspect ORG/NAME` says of a model of the hub whether it is served, and else",
        "why not and which is the nearest that is; `up` and `models pull` refuse it so, after its config.json.",
        "",
        "Heads for multi-token prediction that a checkpoint carries (`mtp.*`, or layers after the last) are skipped,",
        "unless `--draft-model mtp` asks for them ([draft heads](performance.md#draft-heads) says which are computed):",
        "the executor's log and `ryzanstein models inspect` name their tensors and bytes.",
    ]
    return "\n".join(lines) + "\n"

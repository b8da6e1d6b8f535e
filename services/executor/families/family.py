"""What one record says of a family of models: all that the executor knows of it beyond its configuration and modules.

A record is data. Where it names a way of computing (`states`, `mixer`, `own_attention`, ...), the module that computes
so has it under that name. A family stands here when tests/unit/executor/model/test_architectures.py proves it: its
logits equal transformers' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from services.executor.families.plans import Plan

Scores = Literal["softmax", "sigmoid"]
MAMBA = ("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv")


@dataclass(frozen=True)
class LayerStyle:
    """What sets layers apart for our own decoders, beyond what their modules show (`model/lowering.py`)."""

    # Added to the weights of norms; where it is, values are multiplied by them before they are rounded.
    norm_offset: float = 0.0
    post_norms: bool = False  # norms after attention and feed-forward too, under Gemma's names
    scaled: bool = False  # granite's multipliers
    turns_windows_alone: bool = False  # where some layers see a window, those that see all turn nothing
    wide_norms: bool = False  # queries and keys are normed over all heads at once
    norms_turned: bool = False  # queries and keys are normed after their rotation
    interleaved: bool = False  # values that turn together stand side by side
    last_norms: bool = False  # norms after attention and feed-forward, and none before them
    scores: Scores = "softmax"  # what makes a router's outputs scores, where there are experts
    norms_values: bool = False  # values are normed, without a weight
    # What is attended is multiplied by the sigmoid of a gate, which follows each head's query in its projection.
    gated: bool = False


@dataclass(frozen=True)
class ModelFamily:
    """Models of one `model_type` of transformers."""

    # `model_type` | title | models of it, for a reader who knows them by name | what the proof shows beside grouped
    # attention and rotary embeddings; MoE: mixture of experts
    row: str
    also: tuple[str, ...] = ()  # other types of the same text model
    # transformers lists its causal language model among those that take images.
    listed_elsewhere: bool = False

    # How its layers are split over ranks; None: as transformers' own plan says, which is there and gathers nothing
    # needlessly
    plan: Plan | None = None
    lowered: LayerStyle | None = None  # None: PyTorch computes it
    states: str = "attention"  # what layers keep: keys and values, or a kind of `model/states/catalog.py`
    # What configurations call the sizes of Mamba 2's states, in the order of `StateSpaceSizes`
    state_sizes: tuple[str, ...] = ()
    # Without attention: what counts the channels or heads of states, which are split in its place
    state_heads: str = ""
    heads_by_layer: Literal["", "listed", "wider_windows"] = ""  # whether layers have heads of their own
    # Head i and head i + n/2, of n, make one head twice as wide: their values are one.
    paired_heads: bool = False
    # What `layer_types` of configurations may say besides full and sliding attention; empty: as `states` has it
    layer_types: tuple[str, ...] = ()
    # What the module that keeps recurrent state is called in its layer: by all names where layers differ. Where
    # several modules of a layer do, the names of a module's tensors begin with its own and a dot.
    recurrent_modules: tuple[str, ...] = ()
    mixer: str = ""  # how these are split, of the ways that the kind has (`StateKind.splits`)
    # The forward in place of one without transformers' interface (`model/parallel/module_patches.py`)
    own_attention: str = ""
    # What its feed-forward needs where ranks share it (`model/parallel/feed_forward.py`)
    own_feed_forward: str = ""
    drops_step: bool = False  # layers hand their attention no further arguments
    without_cache: bool = False  # it knows no past keys and values: a step is left with its attention modules
    # It computes with a mask before anybody reads it. One of four dimensions it takes as it is.
    with_mask: bool = False
    # Attention learns of its sliding window from the mask alone, which is not built here.
    window_in_mask: bool = False
    # Indexers turn neighbouring values; others turn the halves of what is turned.
    indexer_interleaved: bool = False
    indexer_rotates_last: bool = False  # indexers turn the last values of a head; others turn the first

    unlimited: bool = False  # it attends within windows alone, and names no length
    # Settings that are not served where they are on, and why
    unserved: Mapping[str, str] = field(default_factory=dict)
    # How settings end that name kernels, which transformers refuses where their package is not installed
    authors_kernels: str = ""
    trained: bool = False  # a test compares its gradients with peft's
    # Models embed where their configuration says that they look ahead (`use_bidirectional_attention`).
    embeds_both_ways: bool = False

    # Of encoders that add to their scores what follows from distances, within attention of their own: texts of one
    # length are computed together, and others apart, by one rank.
    one_rank: bool = False
    # Of encoders whose learned positions begin behind the padding token's number
    behind_padding: bool = False

    @cached_property
    def _words(self) -> list[str]:
        return self.row.split(" | ")

    @property
    def model_type(self) -> str:
        return self._words[0]

    @property
    def title(self) -> str:
        return self._words[1]

    @property
    def examples(self) -> str:
        return self._words[2]

    @property
    def shown(self) -> str:
        return self._words[3].replace("MoE", "mixture of experts")

"""What one row says of a GGUF architecture, from which its files are read, checked and written.

A row is data: names of tensors, how their rows and numbers differ from the model's, keys of the metadata and
config.json's words for them. Its transforms are named; `loading/gguf_transforms.py` has them. Rows stand in
`gguf_architectures.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

EXPERTS = {
    "experts.gate_up_proj": ("experts.gate_proj", "experts.up_proj"),
    "experts.down_proj": ("experts.down_proj",),
}


@dataclass(frozen=True)
class GgufArchitecture:
    """How files hold models of one architecture, and what programs that read them take for granted."""

    name: str  # `general.architecture`
    model_type: str = ""  # transformers' for the text model; empty: the same name
    names_of: str = ""  # the architecture whose table in the package `gguf` names the tensors; empty: its own
    # Tensors that the table does not name: the file's name, `{}` for the layer, and the model's
    names: Mapping[str, str] = field(default_factory=dict)
    # How names of layers' tensors begin, and as which the table knows them
    renamed: tuple[str, str] = ("", "")
    # How names of parameters end that are several tensors of the file, one below the other, and how theirs would. Of
    # experts' each expert has its rows side by side.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: EXPERTS)
    # How names of parameters end that are mixed of several tensors where the file has none of their own: a function of
    # `loading/gguf_compositions.py`
    composed: Mapping[str, str] = field(default_factory=dict)
    # Tensors whose matrices, or matrices whose rows, are parameters: the file's name, and the model's, `{}` for the
    # layer, if there is one, and for the number
    stacked: Mapping[str, str] = field(default_factory=dict)
    # How names of parameters end that are [in, out] where the file has [out, in]
    transposed: tuple[str, ...] = ()
    # Keys of the metadata, lists of numbers by layer that are parameters: their names in the model
    numbers: Mapping[str, str] = field(default_factory=dict)
    # By pattern of the file's names: what was done to the model's rows or numbers
    transforms: Mapping[str, str] = field(default_factory=dict)
    # Tensors that follow from the configuration, or are read apart from the model's parameters
    follow: tuple[str, ...] = ()

    # Keys behind the architecture's name that files must have beside the common ones, and config.json's words, empty
    # for none
    settings: Mapping[str, str] = field(default_factory=dict)
    # Those that they may have
    optional: Mapping[str, str] = field(default_factory=dict)
    # Settings of which a file says nothing, and the setting whose value they have; None: none
    defaults: Mapping[str, str | None] = field(default_factory=dict)
    # Settings that all models of the architecture have
    constants: Mapping[str, Any] = field(default_factory=dict)
    # Functions of `loading/gguf_settings`, by name, for settings that follow from several keys, from a list by layer
    # or from which tensors there are
    computed: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # other keys without which the model cannot be built
    # Layers of Gemma's 27B, which scales queries by the width over the heads; smaller ones by the width of a head
    largest: int = 0
    rotates_in_part: bool = False  # `rope.dimension_count` may be a part of a head
    # Types of layers that have rotary positions of their own, which a file says once
    rotations: tuple[str, ...] = ()
    # By a key: the row of files that have it, which hold models of another type
    variants: "Mapping[str, GgufArchitecture]" = field(default_factory=dict)

    written: tuple[str, ...] = ()  # transformers' types of models that are written so
    # Of queries, keys and values, where config.json says attention_bias; else there are none.
    biases: bool = False
    activations: tuple[str, ...] = ("silu",)
    windows: int = 0  # 0: none; 1: in all layers or in none; 2 and more: in all layers but each second, ...
    soft_caps: bool = False  # of scores and logits

    def config_type(self) -> str:
        """transformers' `model_type`."""
        return self.model_type or self.name

    def stack_of(self, name: str) -> tuple[str, int] | None:
        """(the file's tensor of which the parameter is a matrix or a row, its number); None: it is none."""
        for stack, pattern in self.stacked.items():
            if found := re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name):
                *layer, number = map(int, found.groups())
                return stack.format(*layer), number
        return None

    def tensor_names(self, layers: int) -> Callable[[str], str | None]:
        """What files with so many layers call a parameter; None: nothing."""
        import gguf  # takes a while, and most who ask for a row read no tensors

        wanted = self.names_of or self.name
        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
        table = gguf.get_tensor_name_map(number, layers)
        own = {model.format(layer): file.format(layer) for file, model in self.names.items() for layer in range(layers)}
        return lambda name: own.get(name) or table.get_name(name.replace(*self.renamed), (".weight", ".bias"))

"""GGUF files of models that embed or judge: written from transformers' models in llama.cpp's layout, held against
them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from services.executor.collectives.base import SingleRank
from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.model.card import encoder_config
from services.executor.model.conversion.convert import open_model
from services.executor.model.conversion.inspection import inspect
from services.executor.model.encoders.families import family_of
from services.executor.model.encoders.loading import load_encoder
from services.executor.model.loading.config_file import load_config
from services.executor.model.quantized import QuantizedRows
from services.executor.supervisor.host.model_files import size_of
from services.executor.worker.engine import _tasks
from services.gateway.dialects.pooling.prompts import INSTRUCT
from services.gateway.dialects.pooling.prompts import JUDGE as JUDGES
from services.gateway.tokenizer.chat_template import ChatTemplate, traits_of
from services.gateway.tokenizer.templates import TemplateOptions
from shared.errors import ModelLoadError
from tests.unit.executor.model.encoders.test_encoders import assert_close, load, logits_of, served, states_of
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.executor.model.gguf_models import KEYS, Changes, Keys, Tensors, add_tokens, names_of, written
from tests.unit.executor.model.lanes import in_lanes, in_rings, natively
from tests.unit.executor.model.loading.gguf_checks import Wrong, converted, refused
from tests.unit.executor.model.loading.gguf_checks import load as load_decoder
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, make_runner, on_ring
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker import test_pooled
from tests.unit.executor.worker.test_classified import ask

MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # of `pooling_type`
WIDTH = 72  # of a decoder
POOLED: Mapping[int | None, Callable[[Tensor], Tensor]] = {
    MEAN: lambda states: states.mean(dim=0),
    CLS: lambda states: states[0],
    LAST: lambda states: states[-1],
}
WIDE: Keys = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1}
ROTATIONS = {
    kind: {"rope_type": "default", "rope_theta": base}
    for kind, base in (("full_attention", 8e4), ("sliding_attention", 2e3))
}
MODELS: dict[str, tuple[str, str, int, Keys]] = {  # (transformers' type, the file's architecture, pooling, settings)
    "gemma": ("gemma3_text", "gemma-embedding", MEAN, {"query_pre_attn_scalar": 16}),
    "bert": ("bert", "bert", CLS, {"layer_norm_eps": 1e-5}),
    "xlm-roberta": ("xlm-roberta", "bert", MEAN, {"type_vocab_size": 1}),
    "distilbert": ("distilbert", "bert", MEAN, {"dim": 64, "hidden_dim": 96}),
    "modernbert": ("modernbert", "modern-bert", CLS, {"hidden_activation": "silu", "rope_parameters": ROTATIONS}),
    "eurobert": ("eurobert", "eurobert", LAST, {"rope_parameters": {"rope_type": "default", "rope_theta": 25e4}}),
    "jina-v3": ("jina_embeddings_v3", "jina-bert-v3", MEAN, {"type_vocab_size": 1}),
    "nomic": ("nomic_bert", "nomic-bert", MEAN, {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}


def of_gemma(config: Any) -> Keys:
    return {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.to_dict()["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


def of_bert(config: Any) -> Keys:
    return {
        "context_length": config.max_position_embeddings - family_of(config).first_position,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", 1e-12),
        "feed_forward_length": getattr(config, "hidden_dim", config.intermediate_size),
    }


def of_nomic(config: Any) -> Keys:
    return {
        "attention.layer_norm_epsilon": config.layer_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def of_modernbert(config: Any) -> Keys:
    return {
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.sliding_window": config.local_attention,
        "attention.sliding_window_pattern": 3,
        "hidden_activation": config.hidden_activation,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "none",
    }


def of_eurobert(config: Any) -> Keys:
    return {
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.scaling.type": "none",
    }


OWN_KEYS: Mapping[str, Callable[[Any], Keys]] = {
    "gemma-embedding": of_gemma,
    "bert": of_bert,
    "nomic-bert": of_nomic,
    "modern-bert": of_modernbert,
    "eurobert": of_eurobert,
    "jina-bert-v3": of_nomic,
}


def keys_of(name: str, config: Any) -> Keys:
    _, architecture, pooling, _ = MODELS[name]
    said = {key: getattr(config, word) for key, word in SIZES.items()}
    return {**said, "pooling_type": pooling, "attention.causal": False, **OWN_KEYS[architecture](config)}


def tensors_of(architecture: str, source: Path) -> Tensors:
    """As a converter names and changes those of the checkpoint."""
    config = load_config(source)
    names = names_of(architecture, config.num_hidden_layers)
    for own, tensor in load_file(source / "model.safetensors").items():
        name = re.sub(r"^(model|roberta|distilbert)\.", "", own)
        if name.startswith("pooler."):
            continue
        if architecture != "jina-bert-v3":
            name = re.sub(r"^classifier\.(weight|bias)", r"classifier.out_proj.\1", name)
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, own
        if stored == "position_embd.weight":
            tensor = tensor[family_of(config).first_position :]
        if architecture == "bert" and tensor.dim() > 1:
            tensor = tensor.squeeze(0)  # as llama-quantize writes one row
        yield stored, tensor + 1 if architecture.startswith("gemma") and own.endswith("norm.weight") else tensor


def make(
    tmp_path: Path,
    name: str,
    kind: str,
    keys: Keys | None = None,
    tensors: Changes | None = None,
    head: str = "",
    **changes: Any,
) -> tuple[Path, Path]:
    """(transformers' model, the file); what is None in `keys` or `tensors` is left out."""
    model_type, architecture, _, settings = MODELS[name]
    source = make_encoder(tmp_path / "plain", model_type, head, **{**WIDE, **settings, **changes})
    said = {**keys_of(name, load_config(source)), **(keys or {})}
    held = {**dict(tensors_of(architecture, source)), **(tensors or {})}
    file = written(tmp_path / "model.gguf", architecture, said, held, kind, tokenizer=TOKENIZERS.get(name, add_tokens))
    return source, file


def word_pieces(writer: gguf.GGUFWriter, size: int) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*special, *(f"\u2581{number}" for number in range(size - len(special)))])
    writer.add_token_types([3] * len(special) + [1] * (size - len(special)))
    writer.add_token_type_count(2)
    for number, name in enumerate(("padding", "unknown", "cls", "seperator")):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)


TOKENIZERS = {"bert": word_pieces, "nomic": word_pieces}  # others have one of bytes


def theirs(source: Path) -> Any:
    """The encoder that the loader builds."""
    config = encoder_config(source)
    return load_encoder(source, config, torch.float32, SingleRank(), CPU, lambda *_: None, classifies=False).model


def expected(source: Path, name: str, dense: tuple[Tensor, ...] = ()) -> dict[str, list[float]]:
    vectors = {}
    for prompt, states in states_of(source).items():
        vector = POOLED[MODELS[name][2]](states)
        for layer in dense:
            vector = layer @ vector
        vectors[prompt] = (vector / vector.norm()).tolist()
    return vectors


FAST = ["gemma", "bert"]


@pytest.mark.parametrize(("name", "ranks"), in_rings(MODELS, FAST, [(name, 2) for name in MODELS]))
def test_weights_and_settings_and_vectors_are_the_models(tmp_path: Path, name: str, ranks: int) -> None:
    source, file = make(tmp_path, name, "F32")
    made = converted(file)
    before, after = theirs(source).state_dict(), theirs(made).state_dict()
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if "position_embeddings" in key:
            tensor = tensor[family_of(load_config(source)).first_position :]
        assert torch.allclose(after[key], tensor, atol=1e-6), key  # one was added and taken away again
    before, after = load_config(source).to_dict(), load_config(made).to_dict()
    known = type(load_config(source))().to_dict() if after["model_type"] == before["model_type"] else {}
    for key in known.keys() - NOT_OF_THE_FILE:
        assert after[key] == (pytest.approx(before[key]) if isinstance(before[key], float) else before[key]), key
    assert_close(on_ring(ranks, lambda ring: served(made, ring))[0], expected(source, name))
    _, spec = on_ring(1, lambda ring: load(made, ring))[0]
    assert (spec.tasks, spec.normalized, spec.embedding_size) == (["embed"], True, 64)
    assert spec.pooling == {MEAN: "mean", CLS: "cls", LAST: "last"}[MODELS[name][2]]


NOT_OF_THE_FILE = {
    *("architectures", "_name_or_path", "initializer_range", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"),
    *("_sliding_window_pattern", "tie_word_embeddings"),
}


@pytest.mark.parametrize("kind", in_lanes(["Q8_0", "F16", "Q4_0"], ["Q8_0"]))
def test_quantized_files_are_read_as_numbers(tmp_path: Path, kind: str) -> None:
    """The same as a checkpoint of the values that the codes stand for."""
    source, file = make(tmp_path, "gemma", kind)
    made = converted(file)
    held = size_of(ExecutorSettings(), made).weights
    assert held == file.stat().st_size if kind == "F16" else held > 3 * file.stat().st_size  # codes are unpacked
    read = theirs(made)
    read.save_pretrained(str(tmp_path / "read"))
    exact = theirs(source).state_dict()
    assert any(not torch.equal(tensor, exact[key]) for key, tensor in read.state_dict().items())
    assert_close(on_ring(1, lambda ring: served(made, ring))[0], expected(tmp_path / "read", "gemma"))


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    wide, narrow = torch.randn(128, 64), torch.randn(32, 128)
    source, file = make(tmp_path, "gemma", "F32", None, {"dense_2.weight": wide, "dense_3.weight": narrow})
    made = converted(file)
    assert_close(on_ring(1, lambda ring: served(made, ring))[0], expected(source, "gemma", (wide, narrow)))
    _, spec = on_ring(1, lambda ring: load(made, ring))[0]
    assert (spec.pooling, spec.embedding_size) == ("mean", 32)


CLASSIFIERS = ["xlm-roberta", "distilbert", "modernbert"]


@pytest.mark.parametrize(("name", "labels"), in_lanes([(name, count) for name in CLASSIFIERS for count in (1, 3)]))
def test_logits_of_classes(tmp_path: Path, name: str, labels: int) -> None:
    """Whether or not the file says that its model is a classifier."""
    said = {"pooling_type": RANK, "classifier.output_labels": ["a", "b", "c"]} if labels > 1 else {"pooling_type": None}
    source, file = make(tmp_path, name, "F32", said, head="classes", num_labels=labels)
    made = converted(file)
    assert_close(on_ring(1, lambda ring: served(made, ring))[0], logits_of(source))
    _, spec = on_ring(1, lambda ring: load(made, ring))[0]
    assert (spec.tasks, spec.labels) == (["classify"], ["a", "b", "c"] if labels > 1 else ["LABEL_0"])


def decoder(
    tmp_path: Path,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    template: str = "",
    kind: str = "F32",
    **sizes: int,
) -> tuple[Path, Path]:
    """(transformers' Qwen 3, the file). `template`: of pairs."""
    source = make_model(tmp_path / "plain", "qwen3", tie_word_embeddings=True, head_dim=32, **sizes)
    config = load_config(source)
    model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    stored = {str(names.get_name(name, (".weight", ".bias"))): tensor for name, tensor in model.state_dict().items()}
    stored.pop("output.weight")
    said = {key: getattr(config, word) for key, word in KEYS.items()}
    said |= {"rope.freq_base": config.rope_parameters["rope_theta"], **keys}

    def tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
        add_tokens(writer, size)
        if template:
            writer.add_string("tokenizer.chat_template.rerank", template)

    held = {**stored, **(tensors or {})}
    return source, written(tmp_path / "model.gguf", "qwen3", said, held, kind, tokenizer=tokenizer)


def test_vectors_of_a_decoder(tmp_path: Path) -> None:
    source, file = decoder(tmp_path, {"pooling_type": LAST})
    made = converted(file)
    assert_close(on_ring(1, lambda ring: test_pooled.served(made, "last", ring))[0], test_pooled.truth(source, "last"))
    facts = {"pooling": "last", "embedding_size": 9, "normalized": True}
    assert _tasks(made, 9) == (None, {**facts, "generates": False})
    _, plain = decoder(tmp_path / "plain", {})
    assert _tasks(converted(plain), 9) == (None, {**facts, "generates": True})


@natively
def test_native_vectors_of_codes(tmp_path: Path) -> None:
    """Q8_0 stays as it is packed, and is nearly what it was made of."""
    source, file = decoder(tmp_path, {"pooling_type": LAST}, kind="Q8_0", hidden_size=96, intermediate_size=128)
    made = converted(file)
    kept = load_decoder(made, torch.bfloat16, keep_codes=True).model.layers[0].mlp.up_proj.stored
    assert isinstance(kept, QuantizedRows)
    ours, truth = test_pooled.served(made, "last", SingleRank(), native=True), test_pooled.truth(source, "last")
    for name, vector in truth.items():
        assert torch.dot(torch.tensor(ours[name]), torch.tensor(vector)) > 0.999


JUDGE = {"pooling_type": RANK, "classifier.output_labels": ["yes", "no"]}


def test_a_decoder_of_one_class(tmp_path: Path) -> None:
    row = torch.randn(WIDTH)
    head, facts = _tasks(converted(decoder(tmp_path, {"pooling_type": RANK}, {"cls.output.weight": row})[1]), WIDTH)
    assert (facts["labels"], facts["activation"]) == (["LABEL_0"], "sigmoid")
    assert head.weight.tolist() == [row.tolist()]


def test_a_decoder_that_answers_yes_or_no(tmp_path: Path) -> None:
    """Its answer is one class, whose score is the probability of yes against no."""
    rows = 0.2 * torch.randn(2, WIDTH)
    source, file = decoder(tmp_path, JUDGE, {"cls.output.weight": rows})
    made = converted(file)
    _, facts = _tasks(made, WIDTH)
    assert facts == {"pooling": "last", "generates": False, "labels": ["yes"], "activation": "sigmoid"}
    spec = EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, 131, **facts)
    ours = on_ring(1, lambda ring: ask(make_runner(made, ring), ring, spec, made))[0]
    model = AutoModel.from_pretrained(str(source), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        for name, tokens in test_pooled.prompts().items():
            state = model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0, -1]
            likely = (rows @ state).softmax(0)[0].item()
            assert torch.tensor(ours[name]).sigmoid().tolist() == pytest.approx([likely], abs=1e-4)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("", f"<|im_start|>system\n{JUDGES}<|im_end|>\n<|im_start|>user\n<Instruct>: {{}}\n<Query>: q\n<Document>: d"),
        ('"Ä"\n<Instruct>: Guess\n{document}{query}\n\n', '"Ä"\n<Instruct>: {}\ndq\n\n'),
        ("{query}|{document}", "q|d"),
    ],
)
def test_the_template_of_pairs(tmp_path: Path, template: str, shown: str) -> None:
    _, file = decoder(tmp_path, JUDGE, {"cls.output.weight": torch.ones(2, WIDTH)}, template)
    made = ChatTemplate((converted(file) / "chat_template.jinja").read_text(), {})
    assert traits_of(made).pairs
    pair = [{"role": "query", "content": "q"}, {"role": "document", "content": "d"}]
    usual = "Guess" if template else INSTRUCT
    for said, instruction in (({}, usual), ({"instruction": "Find"}, "Find")):
        assert made.render(pair, None, TemplateOptions(variables=said)).startswith(shown.format(instruction))


def test_they_are_told_apart_and_not_converted(tmp_path: Path) -> None:
    _, file = make(tmp_path, "gemma", "Q8_0")
    computed = {tensor.name: tensor.computed_by for tensor in inspect(file).tensors}
    assert computed["blk.0.attn_q.weight"] == "PyTorch (models of type gemma3_text, both ways)"
    with pytest.raises(ModelLoadError, match="is not converted"), open_model(file):
        pass


WRONG: list[Wrong] = [
    ("gemma", {"attention.sliding_window": None}, {}, r"does not say gemma-embedding\.attention\.sliding_window"),
    ("gemma", {"pooling_type": 7}, {}, r"says gemma-embedding\.pooling_type 7"),
    ("gemma", {"pooling_type": 0}, {}, r"says gemma-embedding\.pooling_type 0"),
    ("gemma", {}, {"blk.1.attn_k_norm.weight": None}, r"no tensor layers\.1\.self_attn\.k_norm"),
    ("gemma", {}, {"blk.2.attn_k_norm.weight": torch.ones(16)}, r"hold a tensor blk\.2\.attn_k_norm"),
    ("gemma", {}, {"dense_2.weight": torch.ones(8, 32)}, r"takes 32 numbers and is given 64"),
    ("bert", {"attention.layer_norm_epsilon": None}, {}, r"does not say bert\.attention\.layer_norm_"),
    ("bert", {}, {"position_embd.weight": None}, r"no tensor position_embd\.weight"),
    ("nomic", {}, {"token_types.weight": None}, r"no tensor token_types\.weight"),
    ("bert", {}, {"blk.1.attn_q.bias": None}, r"no tensor encoder\.layer\.1\.attention\.self\.query\.bias"),
    ("bert", {}, {"position_embd.weight": torch.ones(70, 32)}, r"position_embeddings\.weight has the shape \[70, 32\]"),
    ("modernbert", {"attention.layer_norm_epsilon": None}, {}, r"does not say modern-bert\.attention\.layer_norm_"),
    ("modernbert", {}, {"blk.1.attn_norm.weight": None}, r"no tensor layers\.1\.attn_norm\.weight"),
    ("modernbert", {}, {"blk.0.attn_norm.weight": torch.ones(64)}, r"hold a tensor blk\.0\.attn_norm"),
    ("nomic", {}, {"blk.1.attn_qkv.weight": torch.ones(191, 64)}, r"attn_qkv\.weight has the shape \[191, 64\]"),
    ("jina-v3", {}, {"blk.1.attn_qkv.bias": torch.ones(191)}, r"attn_qkv\.bias has the shape \[191\]"),
    ("nomic", {}, {"blk.1.attn_qkv.weight": None}, r"no tensor blk\.1\.attn_qkv\.weight"),
    ("bert", {"pooling_type": None}, {"cls.output.weight": torch.ones(1, 64)}, r"no tensor cls\.weight"),
]
WRONG_DECODERS: list[tuple[Keys, dict[str, Tensor], str]] = [
    ({"attention.causal": False}, {}, r"says qwen3\.attention\.causal false"),
    (JUDGE, {}, r"has no tensor cls\.output\.weight"),
    (JUDGE, {"cls.output.weight": torch.ones(2, 32)}, r"has \[2, 32\] as the shape of cls\.output\.weight"),
    (JUDGE, {"cls.output.weight": torch.ones(3, WIDTH)}, r"has 2 labels \(qwen3\.classifier\.output_labels\) for 3"),
]


@pytest.mark.parametrize(("keys", "tensors", "message"), WRONG_DECODERS, ids=range(len(WRONG_DECODERS)))
def test_decoders_that_are_not_served_so(tmp_path: Path, keys: Keys, tensors: dict[str, Tensor], message: str) -> None:
    _, file = decoder(tmp_path, keys, tensors)
    with refused(message):
        converted(file)


@pytest.mark.parametrize("wrong", WRONG, ids=range(len(WRONG)))
def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path, wrong: Wrong) -> None:
    name, keys, tensors, message = wrong
    _, file = make(tmp_path, name, "F32", keys, tensors)
    with refused(message):
        on_ring(1, lambda ring: load(converted(file), ring))

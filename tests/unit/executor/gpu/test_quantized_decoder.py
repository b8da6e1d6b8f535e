"""The GPU's decoder over quantized weights, against transformers' modules over the same ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.linear import use_products
from services.executor.kv_cache.codecs import FP8, INT8
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.quantizing import CODECS
from services.executor.model.weight_formats import WeightCodec
from services.executor.worker.backends.gpu_decoder import gpu_runner
from services.executor.worker.runner import ModelRunner, widths_of
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, small_model, small_script
from tests.unit.executor.model.gguf_models import write_gguf
from tests.unit.executor.model.loading.quantized_weights import gptq
from tests.unit.executor.model.loading.test_quantized_checkpoints import make_checkpoint
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS

ONE_LAYER = {"intermediate_size": 128, "num_hidden_layers": 1}


def plain(directory: Path) -> Path:
    return small_model(directory, "llama", **ONE_LAYER)


def mixture(directory: Path) -> Path:
    return small_model(directory, "qwen2_moe", num_hidden_layers=1, mlp_only_layers=[])


def mixture_that_pytorch_computes(directory: Path) -> Path:
    # A setting of other models, which this one's code does not look at.
    return small_model(directory, "qwen3_moe", num_hidden_layers=1, clip_qkv=1e4)


def gguf(directory: Path) -> Path:
    """Values of another format than queries and keys, and a head that is the embedding."""
    sizes = ONE_LAYER | {"hidden_size": 256, "vocab_size": 300, "intermediate_size": 256, "tie_word_embeddings": True}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    source = small_model(directory / "plain", "llama", **sizes)
    target = directory / "linked"
    convert_gguf(write_gguf(source, directory / "model.gguf", "Q4_K", attn_v="Q6_K"), target, lambda *_: None)
    return target


def act_order(directory: Path) -> Path:
    """GPTQ, whose second rank has columns of each group."""
    write = lambda made, outputs, inputs: gptq(made, outputs, inputs, ordered=True)  # noqa: E731
    return make_checkpoint(directory, "llama", write, num_hidden_layers=1, vocab_size=100).quantized


@pytest.mark.parametrize(
    ("make", "codec", "ranks"),
    [
        (plain, CODECS["int4"], 2),
        (mixture, INT8, 2),
        (mixture, CODECS["q4_k"], 1),
        (gguf, None, 1),
        (act_order, None, 2),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (plain, INT8, 1),
                (plain, FP8, 2),
                (mixture_that_pytorch_computes, FP8, 1),
                (mixture_that_pytorch_computes, CODECS["int4"], 1),
                (gguf, None, 2),
            )
        ),
    ],
    ids=lambda given: getattr(given, "name", None) or getattr(given, "__name__", str(given)),
)
def test_logits_are_those_of_the_modules(
    tmp_path: Path, make: Callable[[Path], Path], codec: WeightCodec | None, ranks: int
) -> None:
    directory = make(tmp_path)
    plan, _ = small_script().step({0: 4, 1: 1})

    def logits_of(collectives: Collectives, gpu: bool) -> Tensor | None:
        layout = ShardLayout.from_config(load_config(directory), collectives.world_size, collectives.rank)
        progress = lambda done, total: None  # noqa: E731
        model = load_model(
            directory, torch.bfloat16, layout, collectives, CPU, progress, codec, keep_codes=True, defer_codes=gpu
        )
        store = KvStore(StoreShape.uniform(1, BLOCK_SIZE, layout.kv_heads.size, 32, torch.bfloat16), NUM_BLOCKS, CPU)
        if gpu:
            runner = gpu_runner(model, store, layout, collectives)
            assert isinstance(runner._decoder, GpuDecoder) is (make is not mixture_that_pytorch_computes)
        else:
            use_products(model)
            runner = ModelRunner(model, widths_of(model), store, collectives, CPU)
        logits = runner.forward(plan)
        assert logits is None or isinstance(logits, Tensor)
        return logits

    ours, theirs = (
        on_gpu_ring(ranks, lambda collectives, gpu=gpu: logits_of(collectives, gpu))[0]  # type: ignore[misc]
        for gpu in (True, False)
    )
    assert (ours - theirs).abs().mean() < 0.03 * theirs.std()

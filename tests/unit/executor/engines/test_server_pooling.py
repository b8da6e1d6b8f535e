"""Vectors and classes of a server by its URL, and what it must tell to count as exact."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from services.executor.core.engine import EngineSpec
from services.executor.engines.base import EngineFacts, EngineRequest
from services.executor.engines.catalog import CANNOT
from services.executor.engines.leader import with_pooling
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import Numerics
from shared.errors import ConfigurationError, ModelLoadError
from tests.unit.executor.engines.scripted_server import ScriptedServer, vector_answer
from tests.unit.executor.engines.test_server_engine import answers, failed, server_info, serving


def pools(server: ScriptedServer, task: str = "embed") -> None:
    server.told |= {"/pooling": True, "/v1/completions": False}
    server.task = task


def asked(name: str, pool: str, **fields: Any) -> EngineRequest:
    return EngineRequest(name, [1, 2, 3], 3, 0, pool=pool, **fields)


async def test_a_vector_comes_with_the_end() -> None:
    async with serving(start=False) as (server, engine):
        pools(server)
        facts = await engine.start()
        assert (facts.tasks, facts.embedding_size, facts.labels) == (("embed",), 3, [])
        assert facts.unsupported == ["second_segment", "adapter"]
        engine.submit(asked("a", "embed", normalized=False, cache_salt="x"))
        told = (await answers(engine, "a"))["a"]
        assert [delta.vector for delta in told if delta.finish] == [struct.pack("<3f", 0.5, -2.0, 1e-3)]
        assert not any(delta.vector for delta in told[:-1])
        assert (told[-1].finish, sum(delta.cached_tokens for delta in told)) == ("stop", 2)
        assert server.pooled[-1] == {
            "model": "smol",
            "input": [1, 2, 3],
            "task": "embed",
            "use_activation": False,
            "add_special_tokens": False,
            "encoding_format": "base64",
            "embed_dtype": "float32",
            "endianness": "little",
            "cache_salt": "x",
        }


async def test_logits_of_classes_are_as_the_model_gives_them() -> None:
    async with serving(start=False) as (server, engine):
        pools(server, "classify")
        facts = await engine.start()
        assert (facts.tasks, facts.embedding_size, facts.labels) == (("classify",), 0, ["", "", ""])
        engine.submit(asked("a", "classify"))
        assert (await answers(engine, "a"))["a"][-1].vector == struct.pack("<3f", 0.5, -2.0, 1e-3)
        assert server.pooled[-1]["use_activation"] is False


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (vector_answer([1.0]), "it sent a vector of 1 numbers, where it had 3 at the start"),
        (vector_answer([1.0], [2.0]), "no vector that can be read"),
        ({"data": [{"data": "?"}]}, "no vector that can be read"),
        ({"data": [{"data": [1.0, 2.0, 3.0]}]}, "no vector that can be read"),
        ({"data": "x" * (5 << 20)}, "more than 4194304 bytes"),
    ],
)
async def test_what_is_no_vector_fails_one_request(answer: dict[str, Any], said: str) -> None:
    async with serving(start=False) as (server, engine):
        pools(server)
        await engine.start()
        server.told["vector"] = answer
        assert said in (await failed(engine, asked("a", "embed"))).error
        del server.told["vector"]
        engine.submit(asked("b", "embed"))
        assert (await answers(engine, "b"))["b"][-1].finish == "stop"


async def test_llama_cpp_embeds_beside_generating_where_it_was_started_so() -> None:
    async with serving("llama.cpp", start=False) as (server, engine):
        assert (await engine.start()).tasks == ("generate",)
        server.told["/embedding"] = True
        facts = await engine.start()
        assert (facts.tasks, facts.embedding_size) == (("generate", "embed"), 3)
        assert facts.unsupported == CANNOT["llama.cpp"]
        engine.submit(asked("a", "embed"))
        assert (await answers(engine, "a"))["a"][-1].vector == struct.pack("<3f", 0.5, -2.0, 1e-3)
        assert server.pooled[-1] == {"content": [1, 2, 3], "embd_normalize": 2}
        for name, told in zip(
            "bcd", ([{"embedding": [[1.0]]}], [{"embedding": []}], [{"embedding": [[1e300] * 2]}]), strict=True
        ):
            server.told["vector"] = told
            assert "where it had 3 at the start" in (await failed(engine, asked(name, "embed", normalized=False))).error
        server.told["vector"] = [{"embedding": [[1.0], [2.0]]}]  # one for each token
        assert (await engine.start()).tasks == ("generate",)


async def test_a_server_that_pools_in_another_way_is_refused() -> None:
    async with serving(start=False) as (server, engine):
        pools(server, "token_embed")
        with pytest.raises(ConfigurationError, match="neither embeds nor classifies: it says no task classify"):
            await engine.start()


@pytest.mark.parametrize(
    ("config", "labels"), [({}, ["LABEL_0", "LABEL_1"]), ({"id2label": {"1": "b", "0": "a"}}, ["a", "b"])]
)
def test_classes_are_named_by_the_models_files(tmp_path: Path, config: dict[str, Any], labels: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = EngineSpec(block_size=16, num_blocks=1, context_length=8, vocab_size=8)
    facts = EngineFacts("a server", 8, 8, 1, tasks=("classify",), labels=["", ""])
    assert with_pooling(spec, facts, tmp_path).labels == labels
    with pytest.raises(ModelLoadError, match="gives 3 classes, where the model's config"):
        with_pooling(spec, EngineFacts("a server", 8, 8, 1, tasks=("classify",), labels=[""] * 3), tmp_path)


@pytest.mark.parametrize(
    ("told", "exact"),
    [
        (server_info(), True),
        (server_info(cache="float32"), True),
        (server_info(cache="fp8"), False),
        (server_info(quantization="fp8"), False),
        (server_info("bfloat16"), False),
        (server_info("bfloat16", device="cuda"), False),
        (server_info("bfloat16", device="cuda", VLLM_BATCH_INVARIANT=True), True),
        (server_info("bfloat16", device="cpu", VLLM_BATCH_INVARIANT=True), False),
        ({"vllm_config": "as text"}, False),
        ((404, {}), False),
    ],
)
async def test_a_server_counts_as_exact_by_what_it_tells(told: Any, exact: bool) -> None:
    async with serving(start=False) as (server, engine):
        server.told["/server_info?config_format=json"] = told
        server.refused_seeds = ("-1",)
        facts = await engine.start()
        assert facts.exact is exact
        server.refused_seeds = ()
        assert not (await engine.start()).exact


def test_what_a_process_computes_with_counts_likewise() -> None:
    assert Numerics("float32", "", "auto", "cuda", invariant=False).exact
    assert not Numerics("float32", "fp8", "auto", "cuda", invariant=False).exact
    assert Numerics("bfloat16", "", "fp8", "cuda", invariant=True).exact
    assert not Numerics("bfloat16", "", "auto", "cpu", invariant=True).exact

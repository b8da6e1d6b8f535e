"""What vLLM is started with and told: its arguments, the executor's settings, the messages of both sides."""

import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.settings import ENGINE_ONLY, RING_ONLY, ExecutorSettings, check_engine
from services.executor.engines import base
from services.executor.engines.vllm.arguments import PROCESSOR, REFUSED, split_arguments, vllm_arguments
from services.executor.engines.vllm.plugin.ryzanstein_vllm import worker
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import (
    prompt_scores,
    sampling_arguments,
    token_logprobs,
)
from shared.errors import ConfigurationError
from shared.messages import Grammar, SamplingParams, TokenLogprobs
from shared.models import link_gguf

encode = msgspec.msgpack.encode


def arguments(tmp_path: Path, engine_args: str = "", **settings: Any) -> list[str]:
    return vllm_arguments(ExecutorSettings(model="m", engine="vllm", engine_args=engine_args, **settings), tmp_path)


def value(found: list[str], name: str) -> str:
    assert found.count(name) == 1
    return found[found.index(name) + 1]


# --- arguments -----------------------------------------------------------------------------------


def test_vllm_is_told_of_the_model_and_of_our_processor(tmp_path: Path) -> None:
    found = arguments(tmp_path)
    assert value(found, "--model") == str(tmp_path)
    assert value(found, "--logits-processors") == PROCESSOR
    assert not {"--max-model-len", "--dtype", "--max-num-seqs"} & {*found}, "vLLM's own defaults"


@pytest.mark.parametrize("sequences", [7, 64])  # 64: as many as a ring has where nobody says how many
def test_settings_that_vllm_has_too_are_passed_on(tmp_path: Path, sequences: int) -> None:
    found = arguments(tmp_path, dtype="bf16", context_length=100, max_sequences=sequences)
    told = [value(found, name) for name in ("--dtype", "--max-model-len", "--max-num-seqs")]
    assert told == ["bfloat16", "100", str(sequences)]


@pytest.mark.parametrize(
    ("config", "given", "runner"),
    [
        ({"model_type": "llama"}, "", ""),
        ({"model_type": "llama"}, "--runner pooling --convert embed", ""),
        ({"model_type": "llama"}, "--runner=pooling", ""),
        ({"model_type": "bert"}, "", "pooling"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, "", "pooling"),
        ({"model_type": "qwen3", "sentence": True}, "", "pooling"),
        ({"model_type": "qwen3", "sentence": True}, "--runner generate", ""),
    ],
)
def test_vllm_pools_where_the_model_does_or_the_operator_says_so(
    tmp_path: Path, config: dict[str, Any], given: str, runner: str
) -> None:
    if config.pop("sentence", False):
        (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    found = arguments(tmp_path, given)
    own = found[: len(found) - len(given.split())]
    assert (value(own, "--runner") if runner else "--runner" not in own) in (True, runner)
    assert ("--logits-processors" in own) == ("pooling" not in given and not runner)


@pytest.mark.parametrize(
    ("given", "most", "rank"), [("", 64, "64"), ("", 100, "128"), ("", 1, "8"), ("--max-lora-rank=16", 64, "")]
)
def test_adapters_have_the_rank_that_hosts_take(tmp_path: Path, given: str, most: int, rank: str) -> None:
    found = arguments(tmp_path, f"--enable-lora {given}", max_adapter_rank=most)
    assert found[-1 - bool(given)] == "--enable-lora"
    assert found.count("--max-lora-rank") == bool(rank)
    assert not rank or value(found, "--max-lora-rank") == rank


@pytest.mark.parametrize("given", ["--max-num-seqs 9", "--max-num-seqs=9", "--max_num_seqs 9"])
def test_the_operators_arguments_come_last_as_they_stand(tmp_path: Path, given: str) -> None:
    found = arguments(tmp_path, f"{given} --hf-overrides '{{\"a b\": 1}}'", max_sequences=7)
    assert found[-2:] == ["--hf-overrides", '{"a b": 1}']
    assert sum("max" in one for one in found) == 1, "ours is left out"


@pytest.mark.parametrize("form", ["{} x", "{}=x", "--enforce-eager {}"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_take_away_what_a_group_relies_on_is_refused(tmp_path: Path, name: str, form: str) -> None:
    dashes = len(name) - len(name.lstrip("-"))
    for spelt in (name, name[:dashes] + name[dashes:].replace("-", "_")):
        with pytest.raises(ConfigurationError, match=f"has {name}, which cannot be set, since {REFUSED[name]}; leave"):
            arguments(tmp_path, form.format(spelt))


def test_quotes_that_do_not_end_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--engine-args cannot be read \(No closing quotation\); quote it"):
        arguments(tmp_path, "--hf-overrides '{")


def test_a_gguf_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    link_gguf(tmp_path, file)
    with pytest.raises(ConfigurationError, match=r"GGUF file, which vLLM does not serve; .* models convert"):
        arguments(tmp_path)


@given(st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1)))
def test_arguments_are_read_as_a_shell_does(words: list[str]) -> None:
    assert split_arguments(" ".join("'" + word.replace("'", "'\\''") + "'" for word in words)) == words


# --- settings ------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "weight_dtype": "int8",
    "device": "cpu",
    "tp": 2,
    "takes_models": True,
    "weights_memory": 1,
    "max_batch_tokens": 300,
    "prefill_stretch": "7",
    "prefill_gap": 3.0,
    "speculation": "off",
    "draft_model": "d",
    "kv_dtype": "int8",
    "kv_dtype_layers": "0=bf16",
    "kv_memory": 1 << 30,
    "collectives": "gloo",
    "threads": 2,
}
VLLM: dict[str, Any] = {"model": "m", "engine": "vllm"}
SERVER: dict[str, Any] = {"model": "m", "engine_url": "http://127.0.0.1:1", "engine_kind": "vllm"}


@pytest.mark.parametrize("engine", [VLLM, SERVER])
@pytest.mark.parametrize("name", OTHER)
def test_settings_of_rings_do_not_go_with_other_engines(name: str, engine: dict[str, Any]) -> None:
    assert {*RING_ONLY} - {*OTHER} == {"nnodes"}, "which needs a tp that it divides"
    given = {name: OTHER[name]}
    check_engine(ExecutorSettings(model="m", **given))
    with pytest.raises(ConfigurationError, match=f"^--{name.replace('_', '-')} is for the executor's own rings; leave"):
        check_engine(ExecutorSettings(**engine, **given))


@pytest.mark.parametrize(
    ("engine", "name", "needed"),
    [
        *((other, name, "--engine vllm") for name in ENGINE_ONLY["vllm"] for other in ({"model": "m"}, SERVER)),
        *((other, name, "--engine-url") for name in ENGINE_ONLY["server"] for other in ({"model": "m"}, VLLM)),
    ],
)
def test_settings_of_one_engine_do_not_go_with_another(engine: dict[str, Any], name: str, needed: str) -> None:
    given = {**engine, name: "vllm"}
    with pytest.raises(ConfigurationError, match=f"^--{name.replace('_', '-')} goes with {needed}; set that too, or"):
        check_engine(ExecutorSettings(**given))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"engine": "vllm"}, "leave --engine out"), ({"engine_kind": ""}, "needs --engine-kind: vllm, sglang or")],
)
def test_a_servers_settings_go_together(changes: dict[str, Any], reason: str) -> None:
    check_engine(ExecutorSettings(**SERVER))
    with pytest.raises(ConfigurationError, match=reason):
        check_engine(ExecutorSettings(**{**SERVER, **changes}))


# --- messages: the two sides have types of their own ----------------------------------------------

SAMPLING = SamplingParams(0.5, 3, 0.9, 0.1, 7, 1.1, 0.2, 0.3, {5: -1.0}, 2, 4, [1, 2], [[3, 4]])
REQUEST = base.EngineRequest("a/0/1", [1, 2, 3], 2, 9, SAMPLING, [1], Grammar("regex", "a*"), 3, "salt")
DELTA = worker.Delta("a/0/1", [5, 6], "error", [(-0.5, [(5, -0.5)]), (-1.0, [])], 3, "Why.", "invalid_request", b"x")
STEP = worker.StepMessage(7, [DELTA, worker.Delta("b")], 2, 1, 0.5)
READY = worker.ReadyMessage("vLLM 1", 10, 20, 3, 40, "fp32", exact=True, unsupported=["grammar"])


def names(struct: type[msgspec.Struct]) -> list[tuple[str, str]]:
    return [(field.name, field.encode_name) for field in msgspec.structs.fields(struct)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (base.EngineRequest, worker.Generate),
        (base.EngineAbort, worker.Abort),
        (base.EngineDelta, worker.Delta),
        (base.EngineStep, worker.StepMessage),
        (base.EngineFacts, worker.ReadyMessage),
        (base.EngineFailed, worker.FailedMessage),
    ],
)
def test_both_sides_have_the_same_fields(ours: type[msgspec.Struct], theirs: type[msgspec.Struct]) -> None:
    assert names(ours) == names(theirs)
    assert ours.__struct_config__.tag == theirs.__struct_config__.tag
    assert ours.__struct_config__.array_like == theirs.__struct_config__.array_like


def test_a_worker_reads_what_it_is_asked() -> None:
    found = worker._commands.decode(encode(REQUEST))
    assert isinstance(found, worker.Generate)
    for name in ("id", "tokens", "prompt_tokens", "max_tokens", "stop_token_ids", "prompt_logprobs", "cache_salt"):
        assert getattr(found, name) == getattr(REQUEST, name)
    assert found.grammar == {"kind": "regex", "text": "a*"}
    assert found.sampling == msgspec.to_builtins(SAMPLING) | {"logit_bias": {5: -1.0}}
    least = worker._commands.decode(encode(base.EngineRequest("a", [1], 1, 0)))
    assert least == worker.Generate("a", [1], 1, 0)
    assert worker._commands.decode(encode(base.EngineAbort(["a"]))) == worker.Abort(["a"])


def test_a_leader_reads_what_a_worker_tells() -> None:
    found = msgspec.msgpack.decode(encode(STEP), type=base.EngineStep)
    logprobs = [TokenLogprobs(-0.5, [(5, -0.5)]), TokenLogprobs(-1.0)]
    delta = base.EngineDelta("a/0/1", [5, 6], "error", logprobs, 3, "Why.", "invalid_request", b"x")
    assert found == base.EngineStep(7, [delta, base.EngineDelta("b")], 2, 1, 0.5)
    ready = msgspec.msgpack.decode(encode(READY), type=base.EngineFacts)
    assert encode(ready) == encode(READY)
    failed = msgspec.msgpack.decode(encode(worker.FailedMessage("Why.")), type=base.EngineFacts | base.EngineFailed)
    assert failed == base.EngineFailed("Why.")


# --- what vLLM is asked, and what it answers -------------------------------------------------------


def of(**fields: Any) -> worker.Generate:
    return worker.Generate("a", [1, 2, 3], 2, 9, **fields)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0, "top_p": 0.5, "seed": 3}, {"top_k": 1}, {"temperature": 0.0}]
)
def test_the_most_likely_token_is_vllms_own_choice(sampling: dict[str, Any]) -> None:
    assert sampling_arguments(of(sampling={**sampling, "logprobs": 3}, stop_token_ids=[7]), 10) == {}


@pytest.mark.parametrize("given", [{}, {"seed": 4, "top_p": 0.5}, {"temperature": 0.0, "presence_penalty": 0.5}])
def test_all_else_is_the_processors(given: dict[str, Any]) -> None:
    found = sampling_arguments(of(sampling={**given, "logprobs": 0}, stop_token_ids=[7]), 10)
    assert found == {"seed": 0, **given, "prompt_tokens": 2, "vocab_size": 10, "id": "a"}


def test_what_withholds_the_end_knows_what_ends() -> None:
    grammar = {"kind": "regex", "text": "a*"}
    for asked in ({"sampling": {"min_tokens": 2}}, {"sampling": {"temperature": 0.0}, "grammar": grammar}):
        found = sampling_arguments(of(stop_token_ids=[7], **asked), 10)
        assert found["stop_token_ids"] == [7]
        assert found.get("grammar") == asked.get("grammar")


def ranked(*ones: tuple[int, int, float]) -> dict[int, Any]:
    return {token: SimpleNamespace(rank=rank, logprob=logprob) for token, rank, logprob in ones}


def test_the_most_likely_tokens_come_in_their_order_and_no_more_of_them() -> None:
    position = ranked((4, 9, -5.0), (7, 2, -2.0), (3, 1, -1.0), (2, 3, -3.0))  # vLLM's own choice goes first
    assert token_logprobs(position, 4, 2) == (-5.0, [(3, -1.0), (7, -2.0)])
    assert token_logprobs(position, 4, 0) == (-5.0, [])


def test_a_prompts_scores_are_as_an_entry_has_them() -> None:
    positions = [None, ranked((5, 2, -2.0), (3, 1, -1.0)), ranked((6, 1, -0.5))]
    scores = prompt_scores(positions, [9, 5, 6], 2)
    wanted = [(-2.0, 2, 3, -1.0, 5, -2.0), (-0.5, 1, 6, -0.5, 0, -math.inf)]
    assert list(struct.iter_unpack("<fiifif", scores)) == wanted
    assert prompt_scores([None], [9], 0) == b""
    assert list(struct.iter_unpack("<fi", prompt_scores(positions, [9, 5, 6], 0))) == [(-2.0, 2), (-0.5, 1)]

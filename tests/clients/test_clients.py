"""Clients that nobody here wrote, each a program of its own against a stack on the stub engine.

They are heavy, and what they need does not fit the versions in constraints.txt: they live in environments of their own.

    RYZANSTEIN_CLIENTS_PYTHON  interpreters that have langchain-openai, langchain-ollama, langchain-cohere with
                               langchain-community, litellm, instructor, llm, lm-eval, pydantic-ai, anthropic,
                               claude-agent-sdk or cohere (the extra `clients`), with colons between them
    RYZANSTEIN_CLIENTS_NODE    a directory in which `npm install openai ollama @anthropic-ai/sdk @openai/codex` was run

A test whose client is nowhere is skipped, and says so.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest

from services.cli.target import LocalSettings
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from tests.clients.installed import node_with, python_with
from tests.e2e.reference import load_reference
from tests.e2e.stack import Stack

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
MODEL = "stub"
EMBEDDINGS = [32, 32]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("clients"), "--engine", "stub", "--no-smoke-test") as running:
        yield running


def run(*command: str, timeout: float = 150) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


@pytest.mark.slow
def test_langchain(stack: Stack) -> None:
    seen = run(python_with("langchain_openai"), str(HERE / "use_langchain.py"), stack.url, MODEL)
    text, tokens = seen["whole"]
    assert tokens == len(text) == 8
    assert seen["streamed"] == text
    assert len(seen["completion"]) == 4
    assert seen["embeddings"] == EMBEDDINGS


def test_litellm(stack: Stack) -> None:
    seen = run(python_with("litellm"), str(HERE / "use_litellm.py"), stack.url, MODEL)
    text, tokens = seen["whole"]
    assert tokens == len(text) == 8
    assert seen["streamed"] == text
    assert seen["embeddings"] == EMBEDDINGS
    ranked = seen["ranked"]
    assert ranked["hosted_vllm"] == ranked["jina_ai"] == ranked["cohere"]
    (_, best, _), (_, second, _) = ranked["cohere"]
    assert best >= second


def test_cohere(stack: Stack) -> None:
    seen = run(python_with("cohere"), str(HERE / "use_cohere.py"), stack.url, MODEL)
    scores = [score for _, score in seen["everything"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(index for index, _ in seen["everything"]) == [0, 1, 2]
    assert seen["ranked"] == seen["everything"][:2]
    assert seen["tokens"] == sum(len(f"Which is it?\n{one}") for one in ("This one.", "That one.", "None."))
    assert seen["many"] == 3, "more than there are: all"
    assert seen["refused"] == [400, "top_n"]


def test_langchain_rerank(stack: Stack) -> None:
    seen = run(python_with("langchain_cohere"), str(HERE / "use_langchain_rerank.py"), stack.url, MODEL)
    assert seen["cohere"] == seen["jina"]
    assert len(seen["jina"]) == 2
    assert seen["jina"][0][1] >= seen["jina"][1][1]


def test_instructor(stack: Stack) -> None:
    """The stub follows the schema: what it says is of the right types, and of no meaning."""
    seen = run(python_with("instructor"), str(HERE / "use_instructor.py"), stack.url, MODEL)
    assert {name: type(value) for name, value in seen["user"].items()} == {"name": str, "age": int}


def test_pydantic_ai(stack: Stack) -> None:
    """An agent over Anthropic's API: it is made to call the tool of its output, and says what the schema asks for."""
    seen = run(python_with("pydantic_ai"), str(HERE / "use_pydantic_ai.py"), stack.url, MODEL)
    assert {name: type(value) for name, value in seen["person"].items()} == {"name": str, "age": int}
    assert seen["tokens"] > 0
    assert len(seen["streamed"]) == 8


def test_claude_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub never ends by itself: the agent asks it to go on after each cut, and reads the cache every time."""
    python = python_with("claude_agent_sdk")
    monkeypatch.setenv("RYZANSTEIN_STUB_CONTEXT_LENGTH", "200000")
    with Stack(tmp_path / "stack", "--engine", "stub", "--no-smoke-test") as stack:
        (tmp_path / "home").mkdir()
        seen = run(python, str(HERE / "use_claude_agent.py"), stack.url, MODEL, str(tmp_path / "home"))
    usage = seen["modelUsage"][MODEL]
    assert seen["api_error"] == "max_output_tokens"
    assert usage["outputTokens"] % 16 == 0
    assert usage["outputTokens"] > 16, "it has gone on at least once"
    assert usage["cacheReadInputTokens"] > usage["inputTokens"] > 0


def test_anthropic(stack: Stack) -> None:
    """The official Python client, as the npm package below."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        made = client.messages.create(**asked)
        assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 8)
        with client.messages.stream(**asked) as stream:
            said = "".join(stream.text_stream)
            assert len(said) == 8
            assert stream.get_final_message().stop_reason == "max_tokens"
        assert client.messages.count_tokens(model=MODEL, messages=asked["messages"]).input_tokens > 0
        assert [model.id for model in client.models.list()] == [MODEL]


def run_node(package: str, program: str, stack: Stack) -> dict[str, Any]:
    """Skips the test where nothing has the npm `package`."""
    node, modules = node_with(package)
    return run(node, str(HERE / program), stack.url, MODEL, modules)


def test_anthropic_npm(stack: Stack) -> None:
    seen = run_node("@anthropic-ai/sdk", "use_anthropic_npm.mjs", stack)
    assert seen["whole"] == ["text", 8, "max_tokens", 8]
    length, reason, tokens, kinds = seen["streamed"]
    assert (length, reason, tokens) == (8, "max_tokens", 8)
    assert {"message_start", "content_block_start", "message_delta", "message_stop"} <= set(kinds)
    assert seen["called"] == ["tool_use", "tool_use", "weather", {"city": "Rome"}]
    assert seen["answered"] == "message"
    assert seen["counted"] > 0
    assert seen["models"] == [MODEL]
    assert seen["batch"] == [2, "a succeeded", "b succeeded"]
    assert seen["deleted"] == "message_batch_deleted"
    assert seen["refused"] == [True, "invalid_request_error", True]


def test_ollama(stack: Stack) -> None:
    with ollama.Client(host=stack.url, timeout=30) as client:
        options = {"num_predict": 8, "seed": 7}
        messages = [{"role": "user", "content": "Hi"}]
        whole = client.chat(MODEL, messages, options=options)
        parts = list(client.chat(MODEL, messages, options=options, stream=True))
        assert "".join(part.message.content or "" for part in parts) == whole.message.content
        assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 8)
        assert [one.model for one in client.list().models] == [f"{MODEL}:latest"]
        assert [len(one) for one in client.embed(MODEL, ["Hi", "there"]).embeddings] == EMBEDDINGS


def test_ollama_npm(stack: Stack) -> None:
    seen = run_node("ollama", "use_ollama_npm.mjs", stack)
    text, finish, tokens = seen["whole"]
    assert (len(text), finish, tokens) == (8, "length", 8)
    assert seen["streamed"] == [text, "length"]
    assert seen["completion"] == 8
    assert isinstance(seen["formatted"]["age"], int)
    assert seen["embeddings"] == EMBEDDINGS
    assert seen["models"] == seen["loaded"] == [f"{MODEL}:latest"]
    assert seen["capabilities"] == ["completion", "tools", "embedding"]
    assert seen["refused"] == [404, "model 'nobody' not found"]


def test_langchain_ollama(stack: Stack) -> None:
    seen = run(python_with("langchain_ollama"), str(HERE / "use_langchain_ollama.py"), stack.url, MODEL)
    text, tokens = seen["whole"]
    assert tokens == len(text) == 8
    assert seen["streamed"] == text
    assert len(seen["completion"]) == 4
    assert seen["embeddings"] == EMBEDDINGS


def test_openai_npm(stack: Stack) -> None:
    seen = run_node("openai", "use_openai_npm.mjs", stack)
    text, finish, tokens = seen["whole"]
    assert (len(text), finish, tokens) == (8, "length", 8)
    assert seen["streamed"] == [text, 8]
    assert seen["completion"].startswith("Hi")
    assert len(seen["completion"]) == 6
    assert seen["embeddings"] == EMBEDDINGS
    assert seen["models"] == [MODEL]
    assert seen["refused"] == [True, "unsupported_parameter", "suffix"]


@pytest.mark.timeout(600)
def test_lm_eval(tmp_path: Path) -> None:
    """Its own judgement of the real model, by its own reading of the answers, against transformers' log-softmax."""
    python = python_with("lm_eval")
    directory = ensure_model(DEFAULT_MODEL, LocalSettings().store, lambda stage, done, total: None)[1]
    with Stack(tmp_path, "--dtype", "fp32", "--no-smoke-test") as stack:
        seen = run(python, str(HERE / "use_lm_eval.py"), stack.url, DEFAULT_MODEL, str(directory), timeout=500)
    judge = Judge(directory)
    completions, rights = seen["completions"]["samples"], 0
    for line, judged in zip(lines_of("choices"), completions["choices"], strict=True):
        expected = [judge.of(line["question"], f" {ending}") for ending in line["endings"]]
        assert [float(value) for value, _ in judged] == pytest.approx([value for value, _ in expected], abs=1e-3)
        assert [str(greedy) for _, greedy in judged] == [str(greedy) for _, greedy in expected]
        rights += max(range(len(expected)), key=lambda at: expected[at][0]) == line["right"]
    assert seen["completions"]["results"]["choices"]["acc,none"] == rights / len(lines_of("choices"))
    for line, judged in zip(lines_of("passages"), completions["passages"], strict=True):
        assert float(judged[0]) == pytest.approx(judge.passage(line["text"], 510), rel=1e-4)
    prompts = [f"Question: {line['question']}\nAnswer:" for line in lines_of("answers")]
    assert completions["answers"] == [[judge.goes_on(prompt)] for prompt in prompts]
    assert seen["chat"]["samples"]["answers"] == [[judge.goes_on(judge.chat(prompt))] for prompt in prompts]


def lines_of(task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "lm_eval_tasks" / f"{task}.jsonl").read_text().splitlines()]


class Judge:
    """transformers, in fp32."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(str(directory))
        self._model = load_reference(directory)

    def of(self, context: str, ending: str) -> tuple[float, bool]:
        """(log likelihood of `ending` behind `context`, whether it is the greedy one)."""
        before = self._ids(context)
        return self._scored(before, self._ids(context + ending)[len(before) :])

    def passage(self, text: str, most: int) -> float:
        """Log likelihood of a text behind the token that begins one, `most` tokens of it at a time, each with as much
        before it as has room: lm-eval's rolling windows."""
        tokens, sums, done = self._ids(text), 0.0, 0
        while done < len(tokens):
            part = tokens[done : done + most]
            before = tokens[max(0, done + len(part) - most - 1) : done] or [self._tokenizer.bos_token_id]
            sums += self._scored(before, part)[0]
            done += len(part)
        return sums

    def chat(self, question: str) -> str:
        """The prompt of a chat."""
        messages = [{"role": "user", "content": question}]
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def goes_on(self, text: str) -> str:
        """What follows greedily, up to the end of the line."""
        given = self._torch.tensor([self._ids(text)])
        found = self._model.generate(given, max_new_tokens=24, do_sample=False)[0, given.shape[1] :]
        return str(self._tokenizer.decode(found, skip_special_tokens=True)).partition("\n")[0]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _scored(self, context: list[int], ending: list[int]) -> tuple[float, bool]:
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([context + ending]), use_cache=False).logits[0]
        rows = logits[len(context) - 1 : -1].log_softmax(dim=-1)
        wanted = self._torch.tensor(ending)
        return float(rows.gather(1, wanted[:, None]).sum()), bool((rows.argmax(dim=-1) == wanted).all())

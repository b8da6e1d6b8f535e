"""A model without a chat template through the whole house: it is proven, asked and evaluated with texts."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.stack import Stack, run_cli
from tests.unit.executor.model.tiny import make_model
from tests.unit.gateway.tokenizer.tiny_tokenizer import tiny_files

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = make_model(tmp_path_factory.mktemp("model") / "tiny-base", "llama", vocab_size=258)
    for name, data in tiny_files(template=None).items():
        (directory / name).write_bytes(data)
    chat = make_model(tmp_path_factory.mktemp("model") / "a-chat", "llama", vocab_size=258)
    for name, data in tiny_files().items():
        (chat / name).write_bytes(data)
    data_dir = tmp_path_factory.mktemp("base")
    with Stack(data_dir, "--model", str(chat), "--dtype", "fp32", "--no-smoke-test"):
        pass  # the model of the last start, whose name comes first
    with Stack(data_dir, "--model", str(directory), "--dtype", "fp32") as running:
        yield running


def test_the_model_of_the_last_start_is_not_listed(http: httpx.Client) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny-base"]


def test_it_is_proven_with_a_text(stack: Stack) -> None:
    assert "no chat template" in stack.output
    assert "> A distributed system is" in stack.output


def test_a_chat_is_refused_with_what_to_do_instead(http: httpx.Client) -> None:
    model = http.get("/v1/models").json()["data"][0]["id"]
    answer = http.post("/v1/chat/completions", json={"model": model, "messages": [{"role": "user", "content": "Hi"}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "no_chat_template", "messages")
    assert "/v1/completions" in error["message"]
    assert "chat_template.jinja" in error["message"]
    body = {"model": model, "prompt": [5, 6, 7], "echo": True, "logprobs": 1, "max_tokens": 0}
    scores = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    assert [score is None for score in scores] == [True, False, False]


def test_the_command_goes_on_with_a_text(stack: Stack) -> None:
    done = run_cli("chat", "Once upon", "--max-tokens", "8", "--data-dir", str(stack.data_dir))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()

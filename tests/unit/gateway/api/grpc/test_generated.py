"""What was made of protos/ is what would be made of it now, and every method is answered."""

from pathlib import Path
from typing import Any

from services.gateway.api.backend import GatewayBackend
from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.inference import Inference
from services.gateway.api.grpc.requests import chat_request, completion_request
from services.gateway.auth.authenticator import Authenticator
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.intake.schemas import GenerationFields
from services.gateway.job_kinds import KINDS
from shared.service.endpoints import new_registry
from tests.unit.gateway.api.grpc.generate import GENERATED, generate


def test_the_generated_code_is_up_to_date(tmp_path: Path) -> None:
    made = generate(tmp_path)
    assert {path.name for path in made} == {"inference_pb2.py", "inference_pb2.pyi"}
    for path in made:
        assert path.read_bytes() == (GENERATED / path.name).read_bytes(), "run `make protos`"


def test_every_method_has_an_answer() -> None:
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    backend = GatewayBackend(Authenticator(), GatewaySettings(), GatewayMetrics(new_registry()))
    calls = {name: call for kind in KINDS for name, call in kind.calls(backend).items()}
    methods = Inference(backend, calls).methods()
    assert {f"/{service.full_name}/{method.name}" for method in service.methods} == methods.keys()
    for method in service.methods:
        assert methods[f"/{service.full_name}/{method.name}"].streamed == method.client_streaming


SAMPLING: dict[str, Any] = {
    "bad_words": ["bad"],
    "allowed_token_ids": [1, 2],
    "truncate_prompt_tokens": 3,
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": -1.0,
    "frequency_penalty": 1.0,
    "seed": 2**64 - 1,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "logit_bias": {5: -2.0},
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": False,
    "logprobs": 0,
    "prompt_logprobs": 2,
}


def test_every_sampling_parameter_reaches_the_request() -> None:
    assert SAMPLING.keys() == {field.name for field in pb.SamplingParameters.DESCRIPTOR.fields}
    sampling = pb.SamplingParameters(**SAMPLING)
    completion = completion_request(pb.GenerateRequest(model="m", text="x", sampling=sampling))
    assert {name: getattr(completion, name) for name in SAMPLING} == SAMPLING
    said = [pb.ChatMessage(role=pb.ROLE_USER, content="x")]
    chat = chat_request(pb.ChatRequest(model="m", messages=said, sampling=sampling))
    shown = {name: getattr(chat, name) for name in SAMPLING if name != "logprobs"}
    assert shown == {name: value for name, value in SAMPLING.items() if name != "logprobs"}
    assert (chat.logprobs, chat.top_logprobs) == (True, 0)


def test_what_is_not_given_is_not_given() -> None:
    bare = completion_request(pb.GenerateRequest(model="m", text=""))
    for name in GenerationFields.__struct_fields__:
        if name not in ("model", "stream", "stream_options"):
            assert getattr(bare, name) is None, name
    assert bare.stream is True
    whole = completion_request(pb.GenerateRequest(model="m", text="", output=pb.OutputOptions(whole=True)))
    assert (whole.stream, whole.stream_options) == (None, None)

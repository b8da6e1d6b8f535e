"""Bodies that cannot be decoded: the refusal names what is wrong."""

import msgspec
import pytest

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.decoding import decode
from services.gateway.intake.sampling.params import sampling_params
from services.gateway.intake.schemas import CompletionRequest
from shared.messages import ModelCard

DECODER = msgspec.json.Decoder(CompletionRequest)


def body(key: str, rest: str = "") -> bytes:
    return b'{"model":"m","logit_bias":{"3":1,%b:2},"prompt":"x"%b}' % (msgspec.json.encode(key), rest.encode())


@pytest.mark.parametrize("key", ["abc", "1.5", "", " 5", "007", "1e3", "\x1b[2J"])
def test_a_key_that_is_no_token_is_named(key: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        decode(body(key), DECODER)
    assert f"key {key!r} in 'logit_bias'" in str(refused.value)
    assert "from 0 to" in str(refused.value)
    assert refused.value.param == "logit_bias"


@pytest.mark.parametrize("key", ["256", "-1", "9" * 30])
def test_a_token_that_the_model_lacks_is_named_with_the_largest(key: str) -> None:
    request = decode(body(key), DECODER)
    with pytest.raises(InvalidParameter, match=f"'logit_bias': the token id {key} is not within 0 and 255"):
        sampling_params(request, ModelCard("m", 100, 256, [], "", 0))


def test_a_body_that_is_wrong_further_on_is_refused_too() -> None:
    with pytest.raises(InvalidParameter, match="Invalid key in 'logit_bias'"):
        decode(body("abc", ", what"), DECODER)

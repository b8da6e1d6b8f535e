"""Which rings keep page summaries for sparse attention, and which refuse to begin with `--sparse-attention`."""

from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from tests.unit.executor.model.encoders.tiny import make_encoder
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.worker.drafting_ring import ring_of


@pytest.mark.parametrize("kept", [True, False])
def test_a_ring_says_what_it_offers(tmp_path: Path, kept: bool) -> None:
    model = make_model(tmp_path / "model", "llama")
    with ring_of(tmp_path, model, sparse_attention=kept) as ring:
        assert ring.spec.sparse == (["pages", "window"] if kept else ["window"])


def test_latent_attention_has_no_pages_to_choose_from(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "deepseek_v2")
    with (
        pytest.raises(ConfigurationError, match=r"No layer of this model .* so that --sparse-attention"),
        ring_of(tmp_path, model, sparse_attention=True),
    ):
        pytest.fail("it has begun")
    with ring_of(tmp_path, model) as ring:
        assert ring.spec.sparse == []


def test_an_encoder_has_none_either(tmp_path: Path) -> None:
    model = make_encoder(tmp_path / "model", "bert")
    with (
        pytest.raises(ConfigurationError, match="has nothing to choose from; leave it out"),
        ring_of(tmp_path, model, sparse_attention=True),
    ):
        pytest.fail("it has begun")

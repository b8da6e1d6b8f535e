"""What is wrong with the model of a GGUF file names that file, and neither config.json nor the directory made of it."""

from pathlib import Path

import pytest

from services.executor.model.loading.gguf_errors import told_of_file
from shared.errors import ModelLoadError
from shared.models import link_gguf


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "The weights in {made} have no tensor a, which config.json calls for; the directory mixes two models.",
            "The file {file} cannot be used: the weights have no tensor a, which its configuration calls for; fetch "
            "it again, or choose another.",
        ),
        (
            "The model's config.json has no length; add it.",
            "The file {file} cannot be used: the model's configuration has no length; fetch it again, or choose "
            "another.",
        ),
        ("The file has no tensor a; fetch it again.", "The file {file} has no tensor a; fetch it again."),
        ("The file's a and b do not fit; fetch it again.", "The file {file}'s a and b do not fit; fetch it again."),
        (
            "The architecture 'a' is not served: why; choose another model.",
            "The file {file} cannot be used: the architecture 'a' is not served: why; choose another model.",
        ),
        ("The file /other.gguf has no tensor a.", "The file /other.gguf has no tensor a."),
        ("There is no room for the model; give it more.", "There is no room for the model; give it more."),
    ],
)
def test_errors_are_told_of_the_file(tmp_path: Path, said: str, told: str) -> None:
    file, made = tmp_path / "m.gguf", tmp_path / "made"
    made.mkdir()
    with pytest.raises(ModelLoadError) as unchanged, told_of_file(made):
        raise ModelLoadError(said.format(made=made))
    assert str(unchanged.value) == said.format(made=made)
    file.touch()
    link_gguf(made, file)
    for place in (file, made):
        with pytest.raises(ModelLoadError) as raised, told_of_file(place):
            raise ModelLoadError(said.format(made=made))
        assert str(raised.value) == told.format(file=file)

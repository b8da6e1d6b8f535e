"""How a job is shown on a terminal, and what is known of its speed."""

import pytest

from services.cli.commands.fine_tune.progress import JobView, Metrics, figures_of
from tests.unit.cli.commands.fine_tune.fake_gateway import job, message, step
from tests.unit.cli.test_ui import output, screen

NOW = 1_700_000_000.0


def taken(*events: dict[str, object]) -> Metrics:
    metrics = Metrics()
    for event in events:
        metrics.take(event)
    return metrics


def test_figures_are_those_of_the_last_steps() -> None:
    metrics = taken(step(1, 2.0), step(2, 1.5, seconds=0.25), message(1, "A message"), step(3, 1.25, seconds=0.25))
    running = job("running", progress={"step": 3, "steps": 1200}, estimated_finish=int(NOW) + 3725)
    assert figures_of(running, metrics, NOW) == "step 3/1,200, loss 1.25, 400 tokens/s, 1:02:05 left"
    assert figures_of(job("paused", progress={"step": 3, "steps": 4}), metrics, NOW) == "step 3/4, loss 1.25"
    assert figures_of(job("running"), Metrics(), NOW) == ""


def test_steps_that_are_done_again_count_once() -> None:
    """A job that goes on from its last state tells some of its steps again."""
    metrics = taken(step(1, 2.0), step(2, 1.5), step(3, 1.0), step(2, 1.5))
    assert metrics.tokens_per_second is None, "not until it has done two steps again"
    metrics.take(step(3, 1.0))
    assert metrics.tokens_per_second == 200
    assert metrics.loss == 1.0


def test_what_another_server_leaves_out_is_not_shown() -> None:
    bare = [{**step(number, 1.0), "data": {"step": number, "train_loss": 1.0}} for number in (1, 2)]
    assert taken(*bare).tokens_per_second is None
    assert taken({**step(1, 1.0), "data": None}).loss is None


@pytest.mark.parametrize("width", [40, 200])
def test_a_terminal_shows_curve_bar_and_messages(width: int) -> None:
    terminal = screen(width)
    running = job("running", progress={"step": 2, "steps": 4}, estimated_finish=int(NOW) + 60)
    with JobView(terminal) as view:
        view.update(job(waiting_for="All hosts are busy."), [], NOW)
        view.update(job(waiting_for="All hosts are busy."), [message(1, "Created")], NOW)
        view.update(running, [step(1, 2.5), step(2, 1.5, valid_loss=2.0), message(2, "Slow", "warn")], NOW)
    shown = output(terminal)
    assert shown.count("All hosts are busy.") == shown.count("Created") == shown.count("Slow") == 1
    for words in ("2.5 ┤", "1.5 ┤", "o", "step 1", "running"):
        assert words in shown
    assert "step 2/4, loss 1.5, 200 tokens/s, 0:01:00 left" in " ".join(shown.split())
    assert "training loss=" not in shown, "the curve says it"

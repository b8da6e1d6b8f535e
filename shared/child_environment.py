"""The environment of child processes that work on a client's or a model's text. Pure but for reading our own."""

import os


def environment_without_settings() -> dict[str, str]:
    """Ours without any setting, NATS' password among them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RYZANSTEIN_")}

"""The name under which clients ask for a model."""

from pathlib import Path

from services.executor.settings import ExecutorSettings

STUB_MODEL = "stub"


def served_name(settings: ExecutorSettings) -> str:
    """The name that was set, else the last part of the path, else the hub name as it stands."""
    if settings.served_model_name:
        return settings.served_model_name
    if not settings.model:
        return STUB_MODEL
    path = Path(settings.model).expanduser()
    if path.exists():
        return path.resolve().name.removesuffix(".gguf")
    return settings.model

"""Where the command line keeps its data, and the settings of a local stack."""

from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path, user_data_path
from pydantic import Field, SecretStr
from pydantic_settings import CliSuppress

from shared.config import CommonSettings


class LocalSettings(CommonSettings):
    """Settings of the command line; options of the commands take precedence."""

    data_dir: Path = Field(default_factory=lambda: user_data_path("ryzanstein"))
    """The local stack's NATS store, logs and run file."""
    model_cache: Path = Field(default_factory=lambda: user_cache_path("ryzanstein") / "models")
    """Models that were pulled or converted."""
    url: CliSuppress[str] = ""
    """The gateway that commands talk to where no stack runs here."""
    api_key: CliSuppress[SecretStr] = SecretStr("")
    """API key that commands send to that gateway."""


class StackSettings(LocalSettings):
    """Settings of the services that the stack must know as well; they read these by themselves too."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The executors' device: GPUs are divided among the groups unless it is `cpu`."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of each rank; 0: the cores divided among all ranks of the stack."""
    replicas_on_host: int = Field(default=0, ge=0)
    """Executor groups that share this host's memory; 0: those of the stack."""
    tls_certificate: str = ""
    """File of the API's certificate chain (PEM); the API is at https:// then."""
    tls_key: str = ""
    """File of its private key (PEM)."""
    tls_client_ca: str = ""
    """File of the authorities that must have signed clients' certificates; empty: clients need none."""
    drain_grace: float = Field(default=10.0, ge=0)
    """Seconds that an executor takes to finish what runs; only then may it be killed."""
    handover_timeout: float = Field(default=10.0, ge=0)
    """Seconds more that it takes to transfer its sessions' KV blocks to peers."""
    drain_delay: float = Field(default=0.0, ge=0)
    """Seconds that the gateway goes on taking requests before that."""
    drain_timeout: float = Field(default=20.0, ge=0)
    """Seconds that the gateway takes to finish its streams; only then may it be killed."""

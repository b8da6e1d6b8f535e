"""What vLLM's server tells of its sums at /server_info, in development mode alone (VLLM_SERVER_DEV_MODE=1). Without it
nothing of that is known, and no answer counts as exact.
"""

from typing import Any

import msgspec

from services.executor.engines.server.client import ServerClient
from services.executor.engines.vllm.plugin.ryzanstein_vllm.worker import BATCH_INVARIANT, Numerics


class _ModelConfig(msgspec.Struct, frozen=True):
    dtype: str = ""
    quantization: str | None = None


class _CacheConfig(msgspec.Struct, frozen=True):
    cache_dtype: str = ""


class _DeviceConfig(msgspec.Struct, frozen=True):
    device: str = ""


class _Config(msgspec.Struct, frozen=True):
    model: _ModelConfig = msgspec.field(default=_ModelConfig(), name="model_config")
    cache: _CacheConfig = msgspec.field(default=_CacheConfig(), name="cache_config")
    device: _DeviceConfig = msgspec.field(default=_DeviceConfig(), name="device_config")


class _ServerInfo(msgspec.Struct, frozen=True):
    vllm_config: _Config = _Config()
    vllm_env: dict[str, Any] = {}


async def numerics(client: ServerClient) -> Numerics:
    answer = await client.ask("/server_info?config_format=json")
    try:
        told = msgspec.json.decode(answer.body, type=_ServerInfo)
    except msgspec.MsgspecError:
        told = _ServerInfo()
    config = told.vllm_config
    return Numerics(
        dtype=config.model.dtype.removeprefix("torch."),
        quantization=config.model.quantization or "",
        kv_cache=config.cache.cache_dtype,
        device=config.device.device,
        invariant=bool(told.vllm_env.get(BATCH_INVARIANT)),
    )

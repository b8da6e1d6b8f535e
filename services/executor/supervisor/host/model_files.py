"""What a host reads of a model's files without computing with them: their sizes, and weights that sleep.

config.json, sizes of files ─▶ ModelSize       before weights are read, in milliseconds
weights, mapped and resident ─▶ a later load reads no disk
"""

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.executor.core.settings import MTP, ExecutorSettings, packed_directory, packed_name, packed_share
from services.executor.core.weight_formats import WEIGHT_FORMATS
from services.executor.model.catalogue import is_encoder
from services.executor.supervisor.host.memory import ModelSize
from services.executor.supervisor.metrics import GpuReader
from shared.errors import ConfigurationError, InvalidRequest, ModelLoadError, RyzansteinError
from shared.model_store import catalog
from shared.model_store.disk import Named, remove, removing
from shared.model_store.locks import ModelInUse, hold_model
from shared.model_store.packed import discard, discard_of
from shared.model_store.preparation import prepare_model
from shared.model_store.programs import Progress
from shared.models import WEIGHT_DTYPE, linked_gguf

MEMORY_SHARE = 0.9  # of the host's memory, or of each GPU's, that groups may take
MOST_CONFIG = 16 << 20  # bytes of a config.json
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14
# Of a weight that is unpacked from codes, whose bits the configuration does not tell: few, so that more memory is
# promised than is taken, and not less.
_CODE_BITS = 4.5
_STORED_BITS = {"float32": 32.0, "float64": 64.0}


# --- sizes ---------------------------------------------------------------------------------------


def size_of(settings: ExecutorSettings, directory: Path) -> ModelSize:
    """Of the model in `directory`, run by `settings`. Raises `ModelLoadError`."""
    config = read_config(directory)
    packed = packed_files(settings, directory)
    stored = sum(path.stat().st_size for path in (packed or checkpoint_files(directory)))
    text = config.get("text_config")
    facts: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    most = settings.weights_memory * settings.tp or math.inf
    factor = 1.0 if packed else _factor(settings, facts, gguf=bool(linked_gguf(directory)))
    return ModelSize(int(min(stored * factor, most)), _sequence_bytes(settings, facts))


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises `ModelLoadError`."""
    path = directory / "config.json"
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MOST_CONFIG), type=dict[str, Any])
    except OSError as error:
        reason = error.strerror or str(error)
    except msgspec.MsgspecError as error:
        reason = f"it is not JSON: {error}"
    raise ModelLoadError(
        f"{path} cannot be read ({reason}); name a model directory in Hugging Face's layout, or pull the model again."
    )


def checkpoint_files(directory: Path) -> list[Path]:
    """The files that hold the weights, as they came."""
    for found in (linked_gguf(directory), [*directory.glob("*.safetensors")], [*directory.glob("*.bin")]):
        if found:
            return sorted(path for path in found if path.is_file())
    return []


def packed_files(settings: ExecutorSettings, directory: Path) -> list[Path]:
    """The files of packed weights of all ranks, where an earlier start has kept every one of them; else none."""
    where, ranks = packed_directory(settings), settings.tp
    files = [where / packed_name(directory, packed_share(settings, rank, ranks)) for rank in range(ranks)]
    return files if all(path.is_file() for path in files) else []


def _factor(settings: ExecutorSettings, config: Mapping[str, Any], *, gguf: bool) -> float:
    """Bytes in memory for each byte of the checkpoint."""
    if gguf and is_encoder(config):  # its codes are unpacked
        return 16.0 / _CODE_BITS if config.get("dtype") == "bfloat16" else 1.0
    if gguf or isinstance(config.get("quantization_config"), dict):
        asked = config.get(WEIGHT_DTYPE) if settings.weight_dtype == "auto" else settings.weight_dtype
        return 16.0 / _CODE_BITS if asked == "bf16" else 1.0  # its codes are kept
    stored = _STORED_BITS.get(str(config.get("torch_dtype") or config.get("dtype") or ""), 16.0)
    if declared := WEIGHT_FORMATS.get(settings.weight_dtype):
        return declared.stored_bits / stored
    return {"fp32": 32.0, "bf16": 16.0}.get(settings.dtype, stored) / stored


def _sequence_bytes(settings: ExecutorSettings, config: Mapping[str, Any]) -> int:
    """Keys and values of a sequence of full length in 16 bits; 0 where the configuration does not tell."""

    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    if is_encoder(config):
        return 0  # it keeps nothing
    heads = number("num_attention_heads", "n_head")
    size = number("head_dim") or (number("hidden_size", "n_embd") // heads if heads else 0)
    values = 2 * (number("num_key_value_heads") or heads) * size
    if latent := number("kv_lora_rank"):
        values = latent + number("qk_rope_head_dim")
    context = settings.context_length or number("max_position_embeddings", "n_positions", "n_ctx")
    width = 4 if settings.dtype == "fp32" else 2
    return values * width * number("num_hidden_layers", "n_layer") * context


class StoredModel:
    """The files of the model that settings name, in the store of models. The stub engine needs none."""

    def __init__(self, settings: ExecutorSettings) -> None:
        self._settings = settings
        self._store = settings.store
        self._needs_none = settings.engine == "stub"

    @property
    def is_ready(self) -> bool:
        """Whether there is nothing to fetch or to convert."""
        return self._needs_none or catalog.is_ready(self._settings.model, self._store, self._settings.revision)

    async def prepare(self, report: Progress, named: Named | None = None) -> str:
        """Fetches and converts what is not there, in a process that ends when this is cancelled; returns what names
        the model from then on. Raises `ConfigurationError`, `ModelLoadError`."""
        if self._needs_none:
            return self._settings.model
        model, revision = self._settings.model, self._settings.revision
        return str((await prepare_model(model, self._store, report, revision=revision, named=named))[1])

    def size(self) -> ModelSize:
        """Of the model and its draft model together, as far as that is there. Raises `ModelLoadError`."""
        if self._needs_none:
            return ModelSize(0, 0)
        own, draft = size_of(self._settings, self.directory()), self._settings.draft_model
        if draft in ("", MTP) or not catalog.is_ready(draft, self._store):
            return own
        beside = self._settings.model_copy(
            update={"model": draft, "revision": "", "draft_model": "", "weights_memory": 0}
        )
        size = StoredModel(beside).size()
        return ModelSize(own.weights + size.weights, own.sequence + size.sequence)

    def weights(self) -> int:
        """Bytes of the weights in memory; 0: not known."""
        try:
            return self.size().weights if self.is_ready else 0
        except (RyzansteinError, OSError):
            return 0

    def bytes_on_disk(self) -> int:
        if self._needs_none:
            return 0
        return sum(path.stat().st_size for path in checkpoint_files(self.directory()))

    def resident(self) -> "ResidentFiles":
        """What a load would read. Raises `OSError`, `RyzansteinError`."""
        if self._needs_none:
            return ResidentFiles([])
        if self._settings.weights_memory:
            raise ConfigurationError(
                "Weights of which weights_memory keeps a part in memory do not sleep there; a load reads that part."
            )
        directory = self.directory()
        paths = packed_files(self._settings, directory) or checkpoint_files(directory)
        return ResidentFiles(paths, hold_model(directory, self._store.cache))

    def remove(self) -> None:
        """Deletes them, also what was made of them. Raises `InvalidRequest` where they are not the store's own."""
        if self._needs_none or not self.is_ready:
            return
        directory = self.directory()
        if not directory.is_relative_to(self._store.cache.resolve()):
            raise InvalidRequest(
                f"The model {self._settings.model} lies outside the cache {self._store.cache}; delete it yourself."
            )
        packed = packed_files(self._settings, directory)
        with removing(self._store.cache):
            if not remove(directory):
                raise InvalidRequest(f"The model in {directory} is in use; unload it first.")
            for path in packed:
                discard(path)
            discard_of(directory, self._store.packed)

    def directory(self) -> Path:
        """Where they are. Raises `RyzansteinError`."""
        model, revision = self._settings.model, self._settings.revision
        return catalog.ensure_model(model, self._store, lambda *step: None, revision=revision)[1].resolve()


# --- the machine ---------------------------------------------------------------------------------


def host_bytes() -> int:
    """Memory of this host, within its control group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            total = min(total, int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii")))
    return total


def gpus_of(settings: ExecutorSettings) -> list[tuple[str, int]]:
    """(name for CUDA_VISIBLE_DEVICES, bytes of memory) of the GPUs that ranks may use; none where they compute on the
    CPU."""
    if settings.device == "cpu" or settings.engine == "stub":
        return []
    return GpuReader().visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


# --- sleep ---------------------------------------------------------------------------------------


class ResidentFiles:
    """Files whose pages are mapped and have been read: a load takes them from memory. The kernel may still take them
    back when memory runs out, before it ends any process."""

    def __init__(self, paths: Iterable[Path], held: ModelInUse | None = None) -> None:
        """Reads them, which takes as long as the disk does; `held` is released by `close`. Raises `OSError`."""
        self._held = held
        self._maps: list[mmap.mmap] = []
        try:
            for path in paths:
                with path.open("rb") as file:
                    if path.stat().st_size:
                        self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                        _populate(self._maps[-1])
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return sum(map(len, self._maps))

    def close(self) -> None:
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()
        if self._held is not None:
            self._held.release()


def _populate(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(_POPULATE_READ)
    except (OSError, ValueError):  # an older kernel
        for at in range(0, len(mapped), mmap.PAGESIZE):
            mapped[at]

"""Settings of config.json that follow from several keys of a GGUF file, from a list by layer, or from its tensors, by
the names that rows of `families/gguf_architectures.py` have for them. Pure.
"""

from services.executor.model.loading.gguf_settings.common import COMMON, Compute
from services.executor.model.loading.gguf_settings.dense import DENSE
from services.executor.model.loading.gguf_settings.encoders import ENCODERS
from services.executor.model.loading.gguf_settings.mixtures import MIXTURES
from services.executor.model.loading.gguf_settings.state_spaces import STATE_SPACES

COMPUTED: dict[str, Compute] = {**COMMON, **DENSE, **MIXTURES, **STATE_SPACES, **ENCODERS}

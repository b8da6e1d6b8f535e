"""RWKV 4: mixing over time and over channels, each of which keeps the token before; split over the ranks by channels.

    time      wkv_t = (sum over j < t of exp(k_j - decay (t - 1 - j)) v_j + exp(first + k_t) v_t) / (the same of 1)
    channels  sigmoid(receptance) * value(relu(key) ** 2)

The sums are kept over exp(most), with `most` the largest exponent among their terms. It follows from the keys alone,
so that what decays and what is added is computed for a block of tokens at once. transformers scales hidden states down
every few layers, and weights with them in place; here what the modules make is scaled.

    time      key, value, receptance, time_decay, time_first by channel, inputs of output
    channels  key by channel, inputs of value;  receptance: inputs, of which it is given all

Source: Peng et al., "RWKV", https://arxiv.org/abs/2305.13048, section 3 and appendix D.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.executor.core.sharding import ShardLayout
from services.executor.model.parallel.mixers.diagonal_recurrence import recurred
from services.executor.model.parallel.mixers.split import MixerSplit
from services.executor.model.recurrent import StateCache

_BLOCK = 128  # tokens whose sums are in memory at once
_NOTHING = -1e38  # the largest exponent among no terms


def rwkv(config: Any, layout: ShardLayout) -> Mapping[str, MixerSplit]:
    """Of the two modules of a layer, by their names."""
    every: int = config.rescale_every

    def scale_of(module: Any) -> float:
        return 0.5 ** (module.layer_id // every) if every > 0 else 1.0

    attended = layout.dimension(config.attention_hidden_size)
    inner, hidden = layout.dimension(config.intermediate_size), layout.dimension(config.hidden_size)
    return {
        "attention": MixerSplit(
            outputs=dict.fromkeys(("key", "value", "receptance"), (attended,)),
            values=dict.fromkeys(("time_decay", "time_first"), (attended,)),
            inputs={"output": (attended, 0)},
            adapt=lambda module, collectives: _mix_time(module, scale_of(module)),
        ),
        "feed_forward": MixerSplit(
            outputs={"key": (inner,)},
            inputs={"value": (inner, 0), "receptance": (hidden, hidden.start)},
            adapt=lambda module, collectives: _mix_channels(module, scale_of(module)),
        ),
    }


def _mix_time(module: Any, scale: float) -> None:
    def forward(hidden: Tensor, cache: StateCache, **others: object) -> tuple[Tensor, None]:
        before = _before(hidden, cache)
        key = module.key(_mixed(hidden, before, module.time_mix_key))
        value = module.value(_mixed(hidden, before, module.time_mix_value))
        receptance = torch.sigmoid(module.receptance(_mixed(hidden, before, module.time_mix_receptance)))
        decay, first = -torch.exp(module.time_decay.float()), module.time_first.float()
        parts = [
            weighted(key_part.float(), value_part.float(), decay, first, cache.tensors["sums"])
            for key_part, value_part in zip(key.split(_BLOCK, 1), value.split(_BLOCK, 1), strict=True)
        ]
        return module.output(receptance * torch.cat(parts, dim=1).to(key.dtype)) * scale, None

    module.forward = forward


def _mix_channels(module: Any, scale: float) -> None:
    def forward(hidden: Tensor, cache: StateCache, **others: object) -> tuple[Tensor, None]:
        before = _before(hidden, cache)
        key = module.key(_mixed(hidden, before, module.time_mix_key))
        value = module.value(torch.square(torch.relu(key)))
        receptance = module.receptance(_mixed(hidden, before, module.time_mix_receptance))
        return torch.sigmoid(receptance) * value * scale, None

    module.forward = forward


def _before(hidden: Tensor, cache: StateCache) -> Tensor:
    """The token before each of `hidden` [n, T, width], of which the last one is kept."""
    last = cache.tensors["last"]
    before = torch.cat((last.unsqueeze(1).to(hidden.dtype), hidden[:, :-1]), dim=1)
    last.copy_(hidden[:, -1])
    return before


def _mixed(hidden: Tensor, before: Tensor, share: Tensor) -> Tensor:
    return hidden * share + before * (1 - share)


def weighted(key: Tensor, value: Tensor, decay: Tensor, first: Tensor, sums: Tensor) -> Tensor:
    """What time mixing makes of `key` and `value` [n, T, channels]: the same shape. All float32.

    `decay` (below 0) and `first` [channels]; `sums` [n, 3, channels] changes in place: of values and of ones, over
    exp(most), and most; zeros where nothing was there.
    """
    tokens = key.shape[1]
    most = torch.where(sums[:, 1] == 0, _NOTHING, sums[:, 2])
    aged = torch.arange(tokens + 1, device=key.device, dtype=torch.float32)[:, None] * decay
    # Behind each token the largest of key_j + decay * (tokens since j), and before the first one what was there.
    exponents = torch.cat((most.unsqueeze(1), key - aged[1:]), dim=1).cummax(dim=1).values + aged
    old, new = exponents[:, :-1], exponents[:, 1:]
    terms = torch.stack((value, torch.ones_like(value)), dim=2)
    added = torch.exp(key - new).unsqueeze(2) * terms
    states = recurred(torch.exp(old + decay - new).unsqueeze(2), added, sums[:, :2])
    known = torch.cat((sums[:, None, :2], states[:, :-1]), dim=1)
    largest = torch.maximum(old, key + first)
    seen = torch.exp(old - largest).unsqueeze(2) * known
    seen = seen + torch.exp(key + first - largest).unsqueeze(2) * terms
    sums[:, :2], sums[:, 2] = states[:, -1], new[:, -1]
    return seen[:, :, 0] / seen[:, :, 1]

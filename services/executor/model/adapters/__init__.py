"""LoRA adapters: their files, which linears of a model they may change, and what a rank computes with them.

configuration    adapter_config.json, checked
targets          the linears of a model, and what of each a rank holds
files            inspect_adapter, read_adapter: tensors checked against the targets, cut for a rank
modules          transformers' own modules with adapters beside their weights
"""

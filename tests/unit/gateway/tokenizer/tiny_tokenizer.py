"""A tokenizer small enough to be made in a test: byte-level BPE without merges, a chat template."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

TEMPLATE = (
    "{% for message in messages %}\n"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def tiny_files(*, template: str | None = TEMPLATE, in_config: bool = False) -> dict[str, bytes]:
    """The files of a bundle; ids 0 and 1 are <|start|> and <|end|>, which is also put before plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|start|>": 0, "<|end|>": 1} | {char: index for index, char in enumerate(alphabet, 2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 1)])
    tokenizer.enable_truncation(8)
    config: dict[str, object] = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>"}
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    if template is not None and in_config:
        config["chat_template"] = [{"name": "default", "template": template}]
    elif template is not None:
        files["chat_template.jinja"] = template.encode()
    files["tokenizer_config.json"] = json.dumps(config).encode()
    return files

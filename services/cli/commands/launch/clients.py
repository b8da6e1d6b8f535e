"""Clients that `ryzanstein launch` starts: what each needs to talk to a gateway, as arguments, environment and files.

A client's own configuration is never written: settings go into its environment, its arguments, or files in a directory
of ours that it is pointed to. Source: each client's documentation of its settings. A client is a function and its line
in `CLIENTS`. Pure.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Tokens that a client may ask for in an answer, where it wants to be told and the context has room.
_ANSWER = 8192


@dataclass(frozen=True)
class Target:
    """What a client is to talk to."""

    url: str  # of the gateway, without /v1
    model: str
    api_key: str
    context_length: int  # tokens
    directory: Path  # of ours, where files for this client may lie

    @property
    def answer_tokens(self) -> int:
        return max(1, min(_ANSWER, self.context_length // 2))


@dataclass(frozen=True)
class ClientSetup:
    """How a client is started."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # contents by the path below `Target.directory`


@dataclass(frozen=True)
class Client:
    name: str
    program: str  # what is looked for on the path
    install: str  # a command, or where it is to be had
    needs: int  # tokens of context that its own instructions and tools take, and a task beside them
    api: str  # the API that it speaks
    setup: Callable[[Target], ClientSetup]
    calls_tools: bool = True  # else it reads what to do in the model's text


def _claude(target: Target) -> ClientSetup:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return ClientSetup(
        environment={
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.api_key,
            **{f"ANTHROPIC_{name}": target.model for name in models},
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.answer_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(target: Target) -> ClientSetup:
    provider = (
        f'{{name="Ryzanstein",base_url={json.dumps(target.url + "/v1")},wire_api="responses",'
        'env_key="RYZANSTEIN_API_KEY"}'
    )
    settings = {
        "model": json.dumps(target.model),
        "model_provider": '"ryzanstein"',
        "model_context_window": str(target.context_length),
        "model_providers.ryzanstein": provider,
    }
    arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return ClientSetup(tuple(arguments), {"RYZANSTEIN_API_KEY": target.api_key})


def _opencode(target: Target) -> ClientSetup:
    limit = {"context": target.context_length, "output": target.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Ryzanstein",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key},
        "models": {target.model: {"name": target.model, "limit": limit}},
    }
    named = f"ryzanstein/{target.model}"
    settings = {"provider": {"ryzanstein": provider}, "model": named, "small_model": named}
    return ClientSetup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _aider(target: Target) -> ClientSetup:
    model = f"openai/{target.model}"
    known = {
        model: {
            "max_input_tokens": target.context_length,
            "max_output_tokens": target.answer_tokens,
            "litellm_provider": "openai",
            "mode": "chat",
        }
    }
    file = "model-metadata.json"
    arguments = ("--model", model, "--weak-model", model, "--model-metadata-file", str(target.directory / file))
    environment = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.api_key}
    return ClientSetup((*arguments, "--no-show-model-warnings"), environment, {file: json.dumps(known, indent=2)})


def _qwen_code(target: Target) -> ClientSetup:
    environment = {
        "OPENAI_BASE_URL": f"{target.url}/v1",
        "OPENAI_API_KEY": target.api_key,
        "OPENAI_MODEL": target.model,
    }
    return ClientSetup(("--auth-type", "openai"), environment)


def _goose(target: Target) -> ClientSetup:
    return ClientSetup(
        ("session",),
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "GOOSE_CONTEXT_LIMIT": str(target.context_length),
            "OPENAI_HOST": target.url,
            "OPENAI_API_KEY": target.api_key,
        },
    )


def _crush(target: Target) -> ClientSetup:
    model = {
        "id": target.model,
        "name": target.model,
        "context_window": target.context_length,
        "default_max_tokens": target.answer_tokens,
    }
    provider = {"type": "openai-compat", "base_url": f"{target.url}/v1", "api_key": target.api_key, "models": [model]}
    chosen = {"provider": "ryzanstein", "model": target.model}
    settings = {
        "providers": {"ryzanstein": provider},
        "models": {"large": chosen, "small": chosen},
        "options": {"disable_metrics": True, "disable_provider_auto_update": True},
    }
    environment = {"CRUSH_GLOBAL_CONFIG": str(target.directory), "CRUSH_GLOBAL_DATA": str(target.directory / "data")}
    return ClientSetup((), environment, {"crush.json": json.dumps(settings, indent=2)})


def _continue(target: Target) -> ClientSetup:
    model = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": f"{target.url}/v1",
        "apiKey": target.api_key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": target.context_length, "maxTokens": target.answer_tokens},
    }
    settings = {"name": "Ryzanstein", "version": "1.0.0", "schema": "v1", "models": [model]}
    file = "config.yaml"  # of which JSON is a part
    return ClientSetup(("--config", str(target.directory / file)), {}, {file: json.dumps(settings, indent=2)})


def _zed(target: Target) -> ClientSetup:
    model = {
        "name": target.model,
        "max_tokens": target.context_length,
        "max_output_tokens": target.answer_tokens,
        "capabilities": {"tools": True, "images": False},
    }
    provider = {"api_url": f"{target.url}/v1", "available_models": [model]}
    settings = {
        "language_models": {"openai_compatible": {"Ryzanstein": provider}},
        "agent": {"default_model": {"provider": "Ryzanstein", "model": target.model}},
    }
    return ClientSetup(
        ("--user-data-dir", str(target.directory)),
        {"RYZANSTEIN_API_KEY": target.api_key},
        {"config/settings.json": json.dumps(settings, indent=2)},
    )


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# By name, in the order of the help.
CLIENTS = {
    client.name: client
    for client in (
        Client("claude", "claude", "npm install -g @anthropic-ai/claude-code", 40_000, MESSAGES, _claude),
        Client("codex", "codex", "npm install -g @openai/codex", 24_000, RESPONSES, _codex),
        Client("opencode", "opencode", "npm install -g opencode-ai", 24_000, CHAT, _opencode),
        Client("aider", "aider", "uv tool install aider-chat", 8_000, CHAT, _aider, calls_tools=False),
        Client("qwen-code", "qwen", "npm install -g @qwen-code/qwen-code", 24_000, CHAT, _qwen_code),
        Client("goose", "goose", "see https://block.github.io/goose", 16_000, CHAT, _goose),
        Client("crush", "crush", "npm install -g @charmland/crush", 24_000, CHAT, _crush),
        Client("continue", "cn", "npm install -g @continuedev/cli", 16_000, CHAT, _continue),
        Client("zed", "zed", "see https://zed.dev/download", 16_000, CHAT, _zed),
    )
}

"""An agent of pydantic-ai over Anthropic's API: URL and model are the arguments. Prints what it has seen as JSON.

It runs as agents do: the model is made to call the tool in which its output is told, and what it says is checked.
"""

import asyncio
import json
import sys

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

url, name = sys.argv[1:3]


class Person(BaseModel):
    name: str
    age: int


async def main() -> None:
    client = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    model = AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    agent = Agent(model, output_type=Person, instructions="Name somebody.", model_settings={"max_tokens": 400})
    done = await agent.run("Who is it?")
    plain = Agent(model, model_settings={"max_tokens": 8})
    async with plain.run_stream("Hi") as streamed:
        text = await streamed.get_output()
    seen = {"person": done.output.model_dump(), "tokens": done.usage().output_tokens, "streamed": text}
    sys.stdout.write(json.dumps(seen))


asyncio.run(main())

"""The official Python client's tool runner, at a task with a tool: URL and model are the arguments. Prints what it has
seen as JSON."""

import json
import sys

import anthropic

url, model = sys.argv[1:3]
asked: list[str] = []


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather in a city now.

    Args:
        city: Its name.
    """
    asked.append(city)
    return f"{city}: 17 degrees"


with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=512,
        tools=[weather],
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
    )
    answers = [[block.type for block in message.content] for message in runner]
    said = runner.until_done().content[0].text
json.dump({"asked": asked, "answers": answers, "said": said}, sys.stdout)

"""A tool that the model calls, with OpenAI's client: pip install openai"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("RYZANSTEIN_API_KEY", "none"),
)
model = client.models.list().data[0].id


def get_weather(city: str) -> str:
    return f"22 degrees and sunny in {city}"


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 40}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
answer = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=tools,
    tool_choice="required",
    parallel_tool_calls=False,  # a small model goes on calling until it is cut off
    max_tokens=200,
)
messages.append(answer.choices[0].message)
for call in answer.choices[0].message.tool_calls:
    arguments = json.loads(call.function.arguments)  # of the schema: the server draws no token beside it
    print(f"{call.function.name}({arguments})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)})
answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=60)
print(answer.choices[0].message.content)

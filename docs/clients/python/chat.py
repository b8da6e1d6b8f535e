"""A chat, streamed, with OpenAI's client: pip install openai"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("RYZANSTEIN_API_KEY", "none"),
)
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=200, stream=True
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

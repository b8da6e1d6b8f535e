"""The Responses API: a conversation that the server keeps, and an answer that goes on without its reader."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("RYZANSTEIN_API_KEY", "none"),
)
model = client.models.list().data[0].id

first = client.responses.create(model=model, input="My name is Ada.", max_output_tokens=40)
print(first.output_text)
second = client.responses.create(
    model=model, input="What is my name?", previous_response_id=first.id, max_output_tokens=40
)
print(second.output_text)

job = client.responses.create(model=model, input="Tell me a story.", background=True, max_output_tokens=60)
last = -1
for event in client.responses.retrieve(job.id, stream=True):
    last = event.sequence_number  # say that the connection is lost here, and another process goes on
    break
for event in client.responses.retrieve(job.id, stream=True, starting_after=last):
    if event.type == "response.output_text.delta":
        print(event.delta, end="", flush=True)
print()

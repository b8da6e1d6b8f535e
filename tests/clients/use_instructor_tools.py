"""instructor in the mode that calls a tool, against a server: URL and model are the arguments. Prints what it has seen
as JSON."""

import json
import sys

import instructor
import openai
import pydantic

url, model = sys.argv[1:3]


class User(pydantic.BaseModel):
    name: str
    age: int


client = instructor.from_openai(
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
)
user = client.chat.completions.create(
    model=model,
    response_model=User,
    max_retries=0,
    messages=[{"role": "user", "content": "Ann is 31 years old. Who is it?"}],
)
json.dump(user.model_dump(), sys.stdout)

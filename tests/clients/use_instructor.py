"""instructor against a server: URL and model are the arguments. Prints what it has seen as JSON.

It needs an answer that follows a JSON schema: a model, or an engine, that gives one.
"""

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
    openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)
user = client.chat.completions.create(
    model=model,
    response_model=User,
    max_retries=0,
    max_tokens=400,
    seed=7,
    temperature=0,
    messages=[{"role": "user", "content": "Ann is 31 years old. Give her name and age."}],
)
json.dump({"user": user.model_dump()}, sys.stdout)

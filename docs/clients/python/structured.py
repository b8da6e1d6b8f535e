"""An answer of a given form, with OpenAI's client: pip install openai"""

import os

from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=40)
    age: int = Field(ge=0, le=150)


client = OpenAI(
    base_url=os.environ.get("RYZANSTEIN_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("RYZANSTEIN_API_KEY", "none"),
)
answer = client.chat.completions.parse(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Anna is 31. Give me that as JSON."}],
    response_format=Person,
    max_tokens=200,
)
person = answer.choices[0].message.parsed
print(f"{person.name} is {person.age}.")

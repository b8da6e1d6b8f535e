"""langchain-openai against a server: URL and model are the arguments. Prints what it has seen as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, model = sys.argv[1:3]
common = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "max_retries": 0}
chat = ChatOpenAI(**common, max_tokens=8, seed=7)
whole = chat.invoke("Hi")
streamed = "".join(str(chunk.content) for chunk in chat.stream("Hi"))
vectors = OpenAIEmbeddings(**common, check_embedding_ctx_length=False).embed_documents(["Hi", "there"])
json.dump(
    {
        "whole": [whole.content, (whole.usage_metadata or {}).get("output_tokens")],
        "streamed": streamed,
        "completion": OpenAI(**common, max_tokens=4).invoke("Hi"),
        "embeddings": [len(vector) for vector in vectors],
    },
    sys.stdout,
)

"""langchain-ollama against a server: URL and model are the arguments. Prints what it has seen as JSON."""

import json
import sys

from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

url, model = sys.argv[1:]
chat = ChatOllama(model=model, base_url=url, num_predict=8, seed=7, validate_model_on_init=True)
whole = chat.invoke("Hi")
plain = OllamaLLM(model=model, base_url=url, num_predict=4, seed=7)
seen = {
    "whole": [whole.content, whole.usage_metadata["output_tokens"]],
    "streamed": "".join(str(chunk.content) for chunk in chat.stream("Hi")),
    "completion": plain.invoke("Hi"),
    "embeddings": [
        len(vector) for vector in OllamaEmbeddings(model=model, base_url=url).embed_documents(["Hi", "there"])
    ],
}
json.dump(seen, sys.stdout)

"""LiteLLM against a server: URL and model are the arguments. Prints what it has seen as JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a price list
import litellm

url, model = sys.argv[1:3]
common = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
messages = [{"role": "user", "content": "Hi"}]
whole = litellm.completion(**common, messages=messages, max_tokens=8, seed=7)
stream = litellm.completion(**common, messages=messages, max_tokens=8, seed=7, stream=True)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
vectors = litellm.embedding(**common, input=["Hi", "there"])
ranked = {}
for provider in ("hosted_vllm", "jina_ai", "cohere"):
    asked = {"model": f"{provider}/{model}", "query": "Which?", "documents": ["This one.", "That one.", "None."]}
    answer = litellm.rerank(**asked, top_n=2, api_base=url, api_key="none")
    ranked[provider] = [[one["index"], one["relevance_score"], one["document"]["text"]] for one in answer.results]
json.dump(
    {
        "whole": [whole.choices[0].message.content, whole.usage.completion_tokens],
        "streamed": streamed,
        "embeddings": [len(item["embedding"]) for item in vectors.data],
        "ranked": ranked,
    },
    sys.stdout,
)

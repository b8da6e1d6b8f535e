"""Cohere's client against a server: URL and model are the arguments. Prints what it has seen as JSON."""

import json
import sys

import cohere

url, model = sys.argv[1:3]
client = cohere.ClientV2("none", base_url=url)
asked = {"model": model, "query": "Which is it?", "documents": ["This one.", "That one.", "None."]}
ranked = client.rerank(**asked, top_n=2, max_tokens_per_doc=64)
everything = client.rerank(**asked)
many = client.rerank(**asked, top_n=4)
try:
    client.rerank(**asked, top_n=-1)
    refused = None
except cohere.errors.BadRequestError as error:
    refused = [error.status_code, error.body["error"]["param"]]
json.dump(
    {
        "ranked": [[one.index, one.relevance_score] for one in ranked.results],
        "everything": [[one.index, one.relevance_score] for one in everything.results],
        "many": len(many.results),
        "tokens": everything.meta.tokens.input_tokens,
        "refused": refused,
    },
    sys.stdout,
)

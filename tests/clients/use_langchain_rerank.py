"""LangChain's rerankers against a server: URL and model are the arguments. Prints what they have seen as JSON."""

import json
import sys

from langchain_cohere import CohereRerank
from langchain_community.document_compressors import jina_rerank
from langchain_core.documents import Document

url, model = sys.argv[1:3]
jina_rerank.JINA_API_URL = f"{url}/v1/rerank"  # it has no parameter for it
documents = [Document(text) for text in ("This one.", "That one.", "None.")]
rerankers = {
    "cohere": CohereRerank(base_url=url, cohere_api_key="none", model=model, top_n=2),
    "jina": jina_rerank.JinaRerank(jina_api_key="none", model=model, top_n=2),
}
json.dump(
    {
        name: [
            [one.page_content, one.metadata["relevance_score"]]
            for one in reranker.compress_documents(documents, "Which?")
        ]
        for name, reranker in rerankers.items()
    },
    sys.stdout,
)

"""Models that read a text in both directions, for embeddings and classes; tests/unit/executor/model/encoders proves
them."""

from services.executor.families.family import ModelFamily

# fmt: off
FAMILIES = (
    ModelFamily("albert | ALBERT | ALBERT base to xxlarge | layers share their weights"),
    ModelFamily("bert | BERT | all-MiniLM, bge, e5, gte, ms-marco-MiniLM cross-encoders | learned positions, "
        "segments"),
    ModelFamily("camembert | CamemBERT | sentence-camembert | as RoBERTa", behind_padding=True),
    ModelFamily("data2vec-text | data2vec (text) | data2vec-text-base | as RoBERTa", behind_padding=True),
    ModelFamily("deberta | DeBERTa | DeBERTa base, large | attention to content and to distance apart",
        one_rank=True),
    ModelFamily("deberta-v2 | DeBERTa 2, 3 | mxbai-rerank v1, DeBERTa 3 classifiers | attention to content and to "
        "distance apart",
        one_rank=True),
    ModelFamily("distilbert | DistilBERT | multi-qa-distilbert, distilbert-sst-2 | learned positions"),
    ModelFamily("electra | ELECTRA | ms-marco-electra | embeddings of another width"),
    ModelFamily("ernie | ERNIE | ernie-3.0 | learned positions, segments"),
    ModelFamily("eurobert | EuroBERT | EuroBERT 210M to 2.1B | rotary positions, grouped heads, RMS norms"),
    ModelFamily("gte | GTE | gte-base-en-v1.5-hf, gte-multilingual | rotary positions, gated feed-forward"),
    ModelFamily("jina_embeddings_v3 | Jina embeddings 3 | jina-embeddings-v3-hf | rotary positions"),
    ModelFamily("modernbert | ModernBERT | gte-modernbert, modernbert-embed | rotary positions, windows to both "
        "sides"),
    ModelFamily("mpnet | MPNet | all-mpnet, multi-qa-mpnet | biases by distance", one_rank=True, behind_padding=True),
    ModelFamily("nomic_bert | NomicBERT | nomic-embed-text | rotary positions, gated feed-forward"),
    ModelFamily("roberta | RoBERTa | all-distilroberta, quora-roberta cross-encoders | positions from behind the "
        "padding's",
        behind_padding=True),
    ModelFamily("roberta-prelayernorm | RoBERTa, norms first | efficient_mlm | norms before attention",
        behind_padding=True),
    ModelFamily("xlm-roberta | XLM-RoBERTa | bge-m3, bge-reranker-v2-m3, multilingual-e5 | positions from behind the"
        " padding's",
        behind_padding=True),
    ModelFamily("xlm-roberta-xl | XLM-RoBERTa XL | xlm-roberta-xl | norms before attention", behind_padding=True),
)

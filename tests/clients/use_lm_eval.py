"""lm-eval against a server: URL, model and a directory with its tokenizer are the arguments. Prints what it has found
as JSON: of a multiple choice, of a perplexity, and of answers that are generated, as completions and as a chat."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp()
os.environ["OPENAI_API_KEY"] = "none"
import lm_eval
from lm_eval.tasks import TaskManager

url, model, tokenizer = sys.argv[1:4]
work = Path(os.environ["HF_HOME"])
TASKS = Path(__file__).parent / "lm_eval_tasks"
for name in ("choices", "passages", "answers"):
    text = (TASKS / f"{name}.yaml").read_text().replace("DATA", str(TASKS / f"{name}.jsonl"))
    (work / f"{name}.yaml").write_text(text)
manager = TaskManager(include_path=str(work), include_defaults=False)


def evaluate(kind: str, endpoint: str, tasks: list[str], *, chat: bool = False) -> dict[str, object]:
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": model,
            "base_url": f"{url}/v1/{endpoint}",
            "tokenizer_backend": "huggingface",
            "tokenizer": tokenizer,
            "batch_size": 1 if chat else 4,
            "max_length": 512,
        },
        tasks=tasks,
        task_manager=manager,
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    samples = {task: [one["filtered_resps"] for one in found["samples"][task]] for task in tasks}
    return {"results": found["results"], "samples": samples}


completions = evaluate("local-completions", "completions", ["choices", "passages", "answers"])
chat = evaluate("local-chat-completions", "chat/completions", ["answers"], chat=True)
json.dump({"completions": completions, "chat": chat}, sys.stdout, default=str)

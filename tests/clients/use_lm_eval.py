"""lm-eval's models for OpenAI's two routes, on tasks of our own: python use_lm_eval.py BASE_URL TOKENIZER_FOLDER

Prints what each continuation was rated with, and what was generated.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

os.environ["HF_HOME"] = os.getcwd()

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " made of cheese"], "answer": 0},
    {"question": "Two and two are", "choices": [" five", " four"], "answer": 1},
    {"question": "In Paris they speak", "choices": [" French", " Finnish and nothing else"], "answer": 0},
    {"question": "Ice is", "choices": [" hot", " cold", " a kind of bird"], "answer": 1},
]
TASK = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "target_delimiter": "",
}
CHOICE = {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATION = {
    "task": "generation",
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}

Path("questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
for task in (CHOICE, GENERATION):
    Path(f"{task['task']}.yaml").write_text(json.dumps(TASK | task))  # JSON is YAML

base_url, tokenizer = sys.argv[1] + "/v1", sys.argv[2]
name = json.load(urllib.request.urlopen(base_url + "/models"))["data"][0]["id"]
common = {"model": name, "num_concurrent": 2, "max_retries": 1}


def samples(model: str, route: str, task: str, **options):
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={**common, "base_url": base_url + route, "tokenizer": tokenizer},
        tasks=[task],
        task_manager=TaskManager(include_path=os.getcwd(), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )
    return found["samples"][task]


rated = [
    [*argument, *response[0]]
    for sample in samples("local-completions", "/completions", "choice")
    for argument, response in zip(sample["arguments"], sample["resps"], strict=True)
]
generated = [
    [response for sample in taken for response in sample["resps"][0]]
    for taken in (
        samples("local-completions", "/completions", "generation"),
        samples("local-chat-completions", "/chat/completions", "generation", apply_chat_template=True),
    )
]
print(json.dumps({"rated": rated, "generated": generated}))

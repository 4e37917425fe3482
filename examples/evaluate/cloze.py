"""Score a checkpoint on a task of choices: which continuation of a text is the most probable?

    alma train stream --learner sm --out run \\
        --evaluate \\
        'timeout 1h python examples/evaluate/cloze.py stream examples/evaluate/cloze.jsonl' -- ...
    alma report run --metric cloze_error

A line of the task is {"text": ..., "choices": [...], "answer": the place of the right one}. Several
checkpoints are an ensemble, whose log-probabilities are averaged. Needs transformers, as `alma
export` does. A harness is called in the same way: export, run `lm_eval --model hf --model_args
pretrained=FOLDER,trust_remote_code=True --tasks TASK --include_path FOLDER_OF_TASKS --output_path
OUT`, and print its numbers as the last line.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def scores_of(checkpoint: str, stream: str, tasks: list[dict]) -> list[list[float]]:
    """The log-probability of each choice of each task."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "alma",
            "export",
            checkpoint,
            "--out",
            f"{folder}/model",
            "--tokenizer",
            stream,
        ]
        subprocess.run(words, check=True, stdout=sys.stderr)
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/model", trust_remote_code=True
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(f"{folder}/model", trust_remote_code=True)
    scores_of_tasks = []
    for task in tasks:
        start = len(tokenizer(task["text"])["input_ids"])
        scores = []
        for choice in task["choices"]:
            ids = tokenizer(f"{task['text']} {choice}", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                logs = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(float(logs.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
        scores_of_tasks.append(scores)
    return scores_of_tasks


def main() -> None:
    """Print {"cloze_error": the share of tasks whose right choice is not the most probable}."""
    stream, path, *checkpoints = sys.argv[1:]
    tasks = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    of_models = [scores_of(checkpoint, stream, tasks) for checkpoint in checkpoints]
    wrong = 0
    for task, *scores in zip(tasks, *of_models, strict=True):
        sums = list(map(sum, zip(*scores, strict=True)))
        wrong += sums.index(max(sums)) != task["answer"]
    print(json.dumps({"cloze_error": wrong / len(tasks), "cloze_tasks": len(tasks)}))


if __name__ == "__main__":
    main()

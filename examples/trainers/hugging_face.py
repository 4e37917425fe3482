"""A trainer of Hugging Face: alma train STREAM --trainer 'python examples/trainers/hugging_face.py
[MODEL]'.

transformers.Trainer trains the causal language model in the folder MODEL, on a stream that is made
with its tokenizer (alma data --tokenizer MODEL), else a small Llama. It needs the packages
transformers and accelerate.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional

from alma.errors import fail
from alma.trainer import StageTask, TextPart, stop_requests

LENGTH = 64  # tokens of a block
BATCH = 16  # blocks of an update
EVERY = 20  # updates between checkpoints


def build(task: StageTask, seed: int, folder: str | None = None) -> transformers.PreTrainedModel:
    transformers.set_seed(seed)
    folder = folder or next(iter(sys.argv[1:-1]), None)
    if folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        if model.config.vocab_size < task.dictionary:
            problem = f"{model.config.vocab_size:,} ids, and the stream {task.dictionary:,}"
            fail(f"{folder} has {problem}: make the stream by alma data --tokenizer {folder}")
        return model
    small: Any = {"hidden_size": 32, "intermediate_size": 64}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=task.dictionary,
        max_position_embeddings=LENGTH,
        bos_token_id=task.end_token,  # blocks begin with the end of the text before
        eos_token_id=task.end_token,
        **small,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def blocks(task: StageTask, parts: tuple[TextPart, ...]) -> list[torch.Tensor]:
    """Blocks of LENGTH tokens that begin with the last one of the block before; the first begins
    with the end of a text."""
    ids = np.concatenate([[task.end_token], *(part.read_tokens() for part in parts)]).astype(
        np.int64
    )
    return [torch.from_numpy(ids[at : at + LENGTH]) for at in range(0, len(ids) - 1, LENGTH - 1)]


class Reports(transformers.TrainerCallback):
    """Progress for `alma status`, the seconds of all starts, and a checkpoint at a signal."""

    def __init__(self, task: StageTask) -> None:
        self.task = task
        self.stopped = stop_requests()
        self.file = Path(task.out, "seconds")
        before = float(self.file.read_text()) if self.file.exists() else 0.0
        self.began = time.monotonic() - before

    def on_step_end(self, args, state, control, **kwargs):
        if self.stopped():
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        self.file.write_text(str(time.monotonic() - self.began))

    def on_log(self, args, state, control, **kwargs):
        if "loss" in kwargs["logs"]:
            self.task.progress(state.global_step, kwargs["logs"]["loss"])


def train(task: StageTask) -> None:
    end = task.budget.get("updates", 100)
    reports = Reports(task)
    rng = np.random.default_rng([*task.seeds, task.t])
    new = [block for block in blocks(task, task.train) if len(block) == LENGTH]
    old = [block for block in blocks(task, task.earlier) if len(block) == LENGTH]
    drawn = []  # the same at each start
    for _ in range(end * BATCH):
        source = old if rng.random() < task.replay_share else new
        drawn.append(source[rng.integers(len(source))])
    options: Any = {
        "save_steps": EVERY,
        "save_total_limit": 2,
        "logging_steps": EVERY,
        "report_to": "none",
    }
    options |= {"per_device_train_batch_size": BATCH, "learning_rate": 3e-3, "disable_tqdm": True}
    model = build(task, task.seeds[0], task.checkpoint)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(task.out, seed=task.seeds[0], max_steps=end, **options),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in drawn],
        callbacks=[reports],
    )
    # transformers writes trainer_state.json last, so a checkpoint without it is half one
    saved = [path.parent for path in Path(task.out).glob("checkpoint-*/trainer_state.json")]
    newest = max(saved, key=lambda path: int(path.name.partition("-")[2]), default=None)
    trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    if trainer.state.global_step < end:
        sys.exit(75)
    trainer.save_model(str(Path(task.out, "model")))
    amounts: Any = {"updates": end, "tokens": end * BATCH * (LENGTH - 1)}
    amounts["seconds"] = time.monotonic() - reports.began
    task.finish(parameters=model.num_parameters(), checkpoint="model", **amounts)


@torch.no_grad()
def evaluate(task: StageTask) -> None:
    if task.members:
        models = [build(task, 0, path).eval() for path in task.members]
    else:
        models = [build(task, seed).eval() for seed in task.seeds]
    losses = {}
    documents = {}
    for part in task.evaluate:
        of_blocks = []
        for block in blocks(task, (part,)):
            probabilities = [model(block[None, :-1]).logits.softmax(-1) for model in models]
            mean = torch.stack(probabilities).mean(0)
            of_blocks.append(functional.nll_loss(mean[0].log(), block[1:], reduction="none"))
        nll = torch.cat(of_blocks).double()  # of each token
        losses[part.name] = (nll.mean().item(), len(nll))
        documents[part.name] = part.document_losses(nll.numpy())  # to compare models in pairs
    task.finish(losses, documents, parameters=sum(model.num_parameters() for model in models))


if __name__ == "__main__":
    stage_task = StageTask.read(sys.argv[-1])
    if stage_task.action == "train":
        train(stage_task)
    else:
        evaluate(stage_task)

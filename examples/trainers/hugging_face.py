"""A trainer of Hugging Face for `alma train STREAM --trainer 'python examples/trainers/hugging_face.py'`.

With the folder of a causal language model as an argument of COMMAND, it trains that model further: its dictionary
must have the stream's ids. Else it makes a small Llama.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers.trainer_utils import get_last_checkpoint

from alma.trainer import StageTask, TextPart, stop_requests

LENGTH, BATCH = 64, 16


def build(task: StageTask, seed: int, folder: str | None) -> transformers.PreTrainedModel:
    transformers.set_seed(seed)
    if folder := folder or next(iter(sys.argv[1:-1]), None):
        return transformers.AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=task.dictionary, max_position_embeddings=LENGTH, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def blocks(parts: tuple[TextPart, ...]) -> list[np.ndarray]:
    """The tokens in blocks of LENGTH; each repeats the last token of the one before, the first follows an eos."""
    ids = np.concatenate([[2], *(part.read_tokens() for part in parts)]).astype(np.int64)
    return [ids[at : at + LENGTH] for at in range(0, len(ids) - 1, LENGTH - 1)]


class StopAtSignal(transformers.TrainerCallback):
    def __init__(self, task: StageTask):
        self.task, self.stopped = task, stop_requests()

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = self.stopped() or control.should_training_stop

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in (logs or {}):
            self.task.progress(state.global_step, float(logs["loss"]))


def train(task: StageTask) -> None:
    began, end = time.monotonic(), task.budget.get("updates", 100)
    model = build(task, task.seeds[0], task.checkpoint)
    whole = [[one for one in blocks(part) if len(one) == LENGTH] for part in (task.train, task.earlier)]
    replayed = round(len(whole[0]) * task.replay_share / (1 - task.replay_share))
    whole[0] += [whole[1][k % len(whole[1])] for k in range(replayed)]
    examples = [{"input_ids": one, "labels": one} for one in whole[0]]
    arguments = transformers.TrainingArguments(
        task.out, max_steps=end, per_device_train_batch_size=BATCH, learning_rate=3e-3, seed=task.seeds[0],
        save_steps=20, save_total_limit=1, logging_steps=20, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=examples, callbacks=[StopAtSignal(task)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(task.out))
    if trainer.state.global_step < end:
        sys.exit(75)
    trainer.save_model(str(Path(task.out, "model")))
    amounts = {"updates": end, "tokens": end * BATCH * LENGTH, "seconds": time.monotonic() - began}
    task.finish(parameters=model.num_parameters(), checkpoint="model", **amounts)


@torch.no_grad()
def evaluate(task: StageTask) -> None:
    pairs = [(0, path) for path in task.members] or [(seed, None) for seed in task.seeds]
    models = [build(task, seed, path).eval() for seed, path in pairs]
    losses = {}
    for part in task.evaluate:
        nats = 0.0
        for block in map(torch.from_numpy, blocks((part,))):
            mean = torch.stack([model(block[None, :-1]).logits.softmax(-1) for model in models]).mean(0)
            nats += functional.nll_loss(mean[0].log(), block[1:], reduction="sum").item()
        losses[part.name] = nats / part.tokens, part.tokens
    task.finish(losses, parameters=sum(model.num_parameters() for model in models))


if __name__ == "__main__":
    given = StageTask.read(sys.argv[-1])
    train(given) if given.action == "train" else evaluate(given)

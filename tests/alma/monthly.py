"""Made-up records of runs on a stream that grows by a period a month."""

import math

import numpy as np

from alma.evaluations import item_losses_file, write_item_losses
from alma.records import Run

CONFIG = {"learner": "sm", "waiting_time": 1, "replay": False, "seed": 0}
LENGTHS = (250, 1.1)
"""Median and deviation of the logarithm of the tokens of a document."""


def period(t):
    """The name of mega-batch t."""
    return f"{2024 + (t - 1) // 12}-{(t - 1) % 12 + 1:02}"


def drifting(u, p):
    """A loss in nats: older models are worse on newer periods, by .03 a month."""
    return 3.0 + 0.01 * (p % 3) + 0.03 * max(p - u, 0) + 0.015 * max(u - p, 0)


def text_items(count, loss, seed, part):
    """Losses of a model, in nats, on the `count` documents of a part, the same for any model."""
    of_part = np.random.default_rng(part)
    median, deviation = LENGTHS
    tokens = np.maximum(np.round(of_part.lognormal(math.log(median), deviation, count)), 10)
    hard = of_part.normal(0, 0.4, count)
    hard -= (hard * tokens).sum() / tokens.sum()
    of_model = np.random.default_rng([seed, part])
    noise = of_model.normal(0, 0.03, count) + of_model.normal(0, 0.3, count) / np.sqrt(tokens)
    return np.stack([tokens * np.maximum(loss + hard + noise, 0.01), tokens], axis=1)


def image_items(count, error, seed, part):
    """Wrong images of a model on a part: the same image is hard for any model."""
    hard = np.random.default_rng(part).random(count)
    luck = np.random.default_rng([seed, part]).random(count)
    wrong = np.where(luck < 0.1, np.random.default_rng([seed, part, 1]).random(count), hard) < error
    return np.stack([wrong.astype(float), np.ones(count)], axis=1)


class Monthly:
    """A run whose record grew month by month: tested on what arrives, then trained on it.

    `loss(u, p)`: of the model of mega-batch u on the held-out part of p, in nats, or an error. With
    `items` the held-out parts have so many documents or images, whose losses give the cells.
    """

    def __init__(self, directory, loss=drifting, items=0, metric="perplexity", **config):
        self.directory = directory
        self.loss = loss
        self.items = items
        self.metric = metric
        self.config = CONFIG | config
        self.arrived = 0
        self.trained = 0
        self.run = None

    def value(self, model, part):
        """The value of a cell; model 0 is untrained. The losses of items are written first."""
        loss = self.loss(model, part)
        if self.items and model:
            make = text_items if self.metric == "perplexity" else image_items
            losses = make(self.items, loss, model, part)
            write_item_losses(item_losses_file(self.directory, model - 1, part), losses)
            loss = losses[:, 0].sum() / losses[:, 1].sum()
        return math.exp(loss) if self.metric == "perplexity" else loss

    def arrive(self, tested=True):
        """The next period arrives, and the models are tested on it."""
        self.arrived += 1
        config = self.config | {"megabatches": self.arrived}
        self.run = Run.open(self.directory, config, growing=("megabatches",))
        t = self.arrived
        if t > 1 and tested:
            for model in range(self.trained + 1):
                self.run.append_evaluations([self.late(model, t)])

    def late(self, model, t):
        """A late evaluation."""
        stage = model - 1 if model else None
        return {
            "stage": stage,
            "megabatch": t,
            "period": period(t),
            "value": self.value(model, t),
        }

    def row(self, t, trained):
        """The row of t as it is written when the stream ends with `arrived`."""
        model = t if trained else 0
        matrix = [self.value(model, part) for part in range(1, self.arrived + 1)]
        return {
            "t": t,
            "stage": model - 1 if model else None,
            "trained_on": [t] if model else [],
            "metric": self.metric,
            "value": matrix[0],
            "parameters": 10,
            "train_flops": 1e9 if model else 0,
            "eval_flops_per_example": 100,
            "seconds": 0.1,
            "peak_memory_bytes": 1000,
            "extra": {
                "matrix": matrix,
                "matrix_periods": [period(part) for part in range(1, self.arrived + 1)],
            },
        }

    def train(self):
        """Train on every mega-batch that has no model yet."""
        if not self.trained:
            self.run.append(self.row(0, trained=False))
        while self.trained < self.arrived:
            self.trained += 1
            self.run.append(self.row(self.trained, trained=True))

    def months(self, count):
        """So many months: a period arrives, its models are tested, a new one is trained."""
        for _ in range(count):
            self.arrive()
            self.train()
        return self

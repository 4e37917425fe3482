"""The base class of all learners: a model that every stage trains further, after growth if it
grows.

torch is imported inside the methods that use it: the command line reads the settings of all
learners, and starts without torch.
"""

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alma.errors import UserError
from alma.options import option
from vision.presets import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vision.examples import AnyExamples
    from vision.mixture import Mixture
    from vision.models import Factory
    from vision.optim import Average
    from vision.stage_data import StageData
    from vision.train import Callback, Progress


class Learner:
    """Base class of learners of images of `shape` (channels, height, width).

    `classes` is the number of classes so far. `seed` determines initial weights, order of
    minibatches and augmentation; global generators are not used. A subclass implements `build`,
    unless it has one network, and sets `settings_class` if it has settings of its own. The first
    line of its docstring is its entry in `vision/run.py --help`.
    """

    settings_class: type[Settings] = Settings
    settings: Settings

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        settings: Settings,
        seed: int,
        device: "torch.device",
        factory: "Factory | None" = None,
    ):
        self.factory = factory  # builds the user's backbone; None: the one of `settings.arch`
        self.shape = tuple(shape)
        self.classes = classes
        self.settings = settings
        self.seed = seed
        self.device = device
        self.generators = [self.generator_for("order")]
        self.generators += [self.generator_for("order", m) for m in range(1, self.orders)]
        self.valid: dict[str, float] | None = None
        self.model = self.build({}).to(device)
        self.reset(0)
        self.average = self.new_average()

    @property
    def orders(self) -> int:
        """Number of generators that shuffle and augment minibatches: 1, or one per member."""
        return 1

    def build(self, structure: dict[str, Any]) -> Any:
        """Build a new model; here one network.

        `structure` has the sizes of a model that has grown, as the property `structure` returned
        them; {} gives the initial sizes.
        """
        return self.backbone()

    def reset(self, stage: int, purpose: str = "init") -> None:
        """Draw new weights for all members, by the seed, the `stage` and the `purpose`."""
        for member in range(self.model.members):
            self.model.reset(self.generator_for(purpose, member, stage), member)

    def widen(self, classes: int, stage: int) -> None:
        """Extend the model to `classes` classes; only the outputs of new classes get new
        weights."""
        structure = self.structure
        old_model = self.model
        self.classes = classes
        self.model = self.build(structure).to(self.device)
        self.reset(stage, "classes")
        new_weights = copy.deepcopy(self.model)
        _copy_into(self.model, old_model)
        if self.average:
            _copy_into(new_weights, self.average.model)
            self.average.model = new_weights

    def new_average(self) -> "Average | None":
        """With `settings.average`, an empty average of models of the current shape."""
        from vision.optim import Average

        return Average(self.model, self.settings.average) if self.settings.average else None

    @property
    def deployed(self) -> Any:
        """The model that predicts: the average if there is one."""
        return self.average.model if self.average else self.model

    @property
    def structure(self) -> dict[str, Any]:
        """Current sizes of the model, for `build`."""
        return {}

    def train(
        self,
        index: int,
        data: "StageData",
        resumed: "Progress | None" = None,
        callback: "Callback | None" = None,
    ) -> dict[str, float]:
        """Train on stage `index`, then set `valid`, the mean loss and error on its validation set.

        `resumed` is the progress that an interrupted call passed to `callback`. Returns FLOPs by
        purpose.
        """
        from vision.train import Drawing, Progress, fit

        progress = resumed or Progress(spent=self.prepare(index, data))
        train = data.train(index)
        valid = data.valid(index)
        every_epoch = self.average if self.average and self.average.every_epoch else None
        flops = fit(
            self.model,
            train,
            valid,
            self.settings,
            self.generators,
            drawing=Drawing(data.black, data.replay(index)),
            progress=progress,
            callback=callback,
            average=every_epoch,
        )
        if self.average and not every_epoch:
            self.average.following(self.model)()
        self.finish()
        self.valid = self.assess(self.deployed, valid)
        flops["validation"] += len(valid.labels) * self.eval_flops_per_example
        return flops

    def prepare(self, index: int, data: "StageData") -> dict[str, float]:
        """Called before the training of stage `index`; returns FLOPs by purpose."""
        if self.settings.from_scratch:
            self.reset(index)
        return {}

    def finish(self) -> None:
        """Called after the training of a stage."""

    def predict(self, examples: "AnyExamples", cache: dict[str, Any]) -> tuple["Tensor", float]:
        """Predicted classes (n,) and FLOPs; `cache` keeps results for later calls on the same
        examples."""
        flops = len(examples.labels) * self.eval_flops_per_example
        return self.classify(self.deployed, examples), flops

    def classify(self, model: Any, examples: "AnyExamples") -> "Tensor":
        """Classes (n,) predicted by `model`, the current model or its average."""
        from vision.train import evaluate

        return evaluate(model, examples, lambda images: self.scores(model(images)).argmax(0))

    def assess(self, model: Any, examples: "AnyExamples") -> dict[str, float]:
        """Mean cross-entropy (nats) and error of `model`, the current model or its average.

        UserError: the loss is not finite.
        """
        from torch.nn import functional as F

        from vision.train import DIVERGED

        judged = self.judged(model, examples)
        loss = float(F.nll_loss(judged[:-1].t(), examples.labels))
        if not math.isfinite(loss):
            raise UserError(DIVERGED)
        return {"loss": loss, "error": float((judged[-1] != examples.labels).double().mean())}

    def judged(self, model: Any, examples: "AnyExamples") -> "Tensor":
        """Predictions of `model`, (C + 1, n).

        The first C rows are the logarithms of the classes' probabilities, the last row is the
        predicted class.
        """
        import torch

        from vision.train import evaluate

        def judge(images: "Tensor") -> "Tensor":
            log_probabilities = self.log_probabilities(self.votes(model, images))
            return torch.cat([log_probabilities, log_probabilities.argmax(0)[None]])

        return evaluate(model, examples, judge)

    def votes(self, model: Any, images: "Tensor") -> "Tensor":
        """Logits (V, C, n) of all voters."""
        return model(images)

    def scores(self, logits: "Tensor") -> "Tensor":
        """Logits (V, C, n) of the voters -> values (C, n) whose argmax is the predicted class.

        These are the mean of the voters' probabilities, or the logits of a single voter.
        """
        return logits.softmax(1).mean(0) if len(logits) > 1 else logits[0]

    def log_probabilities(self, logits: "Tensor") -> "Tensor":
        """Logits (V, C, n) of the voters -> logarithm of the mean of their probabilities (C, n)."""
        return logits.log_softmax(1).logsumexp(0) - math.log(len(logits))

    @property
    def parameters(self) -> int:
        """Current number of free parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def eval_flops_per_example(self) -> float:
        """Current FLOPs of one prediction."""
        return self.model.flops.inference

    @property
    def details(self) -> dict[str, Any]:
        """JSON values for the `extra` field of a row: members, or the sizes of a model that
        grows."""
        members = getattr(self.settings, "members", None)
        if members:
            return self.structure | {"members": members}
        return self.structure

    def state(self) -> dict[str, Any]:
        """Everything that training changes, as tensors and plain values."""
        state = {
            "structure": self.structure,
            "classes": self.classes,
            "model": self.model.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "valid": self.valid,
        }
        if self.average:
            state["average"] = self.average.state()
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` of a learner with the same settings."""
        self.classes = state["classes"]
        self.model = self.build(state["structure"]).to(self.device)
        self.model.load_state_dict(state["model"])
        for generator, values in zip(self.generators, state["generators"], strict=True):
            generator.set_state(values.cpu())
        self.valid = state["valid"]
        self.average = self.new_average()
        if self.average:
            self.average.load(state["average"])

    def generator_for(self, *purpose: str | int) -> "torch.Generator":
        """A new CPU generator, seeded by a hash of the run's seed and the purpose."""
        import torch

        text = " ".join(map(str, (self.seed, *purpose)))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        return torch.Generator().manual_seed(number)

    def backbone(
        self,
        members: int = 1,
        joint: str | None = None,
        widths: Any = None,
        classes: int | None = None,
    ) -> Any:
        """A stack of `members` networks of the chosen architecture.

        `widths` replaces those of the settings, `classes` the current number of classes.
        """
        from vision.models import MLP, VGG, mlp_widths, vgg_widths

        settings = self.settings
        if classes is None:
            classes = self.classes
        if settings.whole:
            from vision.classifiers import Classifier
            from vision.mixture import Committee

            networks = []
            for member in range(members):
                generator = self.generator_for("init", member, 0)  # of the first `reset`
                network = Classifier(self.shape, classes, settings, self.factory, generator)
                networks.append(network)
            return Committee(networks, joint)
        if settings.arch == "vgg":
            widths = widths or vgg_widths(settings.hidden)
            return VGG(self.shape, widths, classes, members, joint)
        widths = widths or mlp_widths(self.shape, settings.hidden, classes)
        return MLP([*widths[:-1], classes], members, joint)

    def mixture(self, experts: int, classes: int | None = None) -> "Mixture":
        """A mixture of `experts` experts per layer; its learner has `MixtureSettings`.

        `classes` replaces the current number of classes.
        """
        from vision.mixture import mixture_mlp, mixture_vgg
        from vision.models import mlp_widths, vgg_widths

        settings: Any = self.settings
        if classes is None:
            classes = self.classes
        tree = settings.router == "tree"
        hard = settings.gate == "hard"
        if settings.arch == "vgg":
            blocks = vgg_widths(settings.hidden)
            return mixture_vgg(self.shape, blocks, classes, experts, tree, hard)
        widths = mlp_widths(self.shape, settings.hidden, classes)
        return mixture_mlp(widths, experts, tree, hard)


def _copy_into(model: Any, old_model: Any) -> None:
    """Copy each tensor of `old_model` into the leading corner of the larger tensor in `model`."""
    weights = model.state_dict()
    for name, values in old_model.state_dict().items():
        rows_and_columns = tuple(slice(size) for size in values.shape)
        weights[name][rows_and_columns] = values


@dataclass(frozen=True)
class GrowthSettings(Settings):
    """Settings of learners whose model grows."""

    own_layers = True
    grow_every: int = option(1, "grow before every K-th stage", at_least=1)


class GrowingLearner(Learner):
    """A learner whose model grows before every `grow_every`-th stage, except the first."""

    settings: GrowthSettings

    def grow(self, index: int, data: "StageData") -> dict[str, float]:
        """Grow the model before stage `index`.

        Returns FLOPs by purpose: "growth" to select candidates, "validation" to measure their
        effect.
        """
        raise NotImplementedError

    def prepare(self, index: int, data: "StageData") -> dict[str, float]:
        """Grow if it is due, then draw new weights with `from_scratch`."""
        due = index > 0 and index % self.settings.grow_every == 0
        flops = self.grow(index, data) if due else {}
        return flops | super().prepare(index, data)


@dataclass(frozen=True)
class MixtureSettings(Settings):
    """Settings of mixtures of experts."""

    own_layers = True
    gate: str = option("soft", "weight all experts, or sample one", choices=("soft", "hard"))
    router: str = option(
        "tree", "binary tree of gates, or one flat softmax", choices=("tree", "flat")
    )
    experts: int = option(
        1, "initial experts per layer; gens: per layer of each member", at_least=1
    )

"""Export the model of a run of images, for `alma export`."""

import math
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alma.errors import UserError, require_package
from alma.files import filled, write_json_atomic
from alma.records import Run

if TYPE_CHECKING:
    from vision.data import Dataset
    from vision.learners import Learner

ONNX_ERROR = 1e-4
"""Largest accepted difference between the probabilities of PyTorch and of onnxruntime."""
_LOADER = Path(__file__).with_name("loader.py")


def write_onnx(learner: "Learner", data: "Dataset", file: Path) -> None:
    """Write the model as ONNX: "images", bytes (n, channels, height, width), to "probabilities" (n,
    C).

    UserError: PyTorch cannot export it, or the probabilities of onnxruntime differ.
    """
    import onnxruntime
    import torch

    class Deployed(torch.nn.Module):
        model: Any

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return learner.log_probabilities(self.model(data.normalised(images))).exp().t()

    deployed = Deployed().eval()
    deployed.model = learner.deployed.eval()
    images = torch.arange(6 * math.prod(data.shape)).mul(37).to(torch.uint8).view(6, *data.shape)
    batch = {"images": {0: torch.export.Dim("n")}}
    names: Any = {
        "input_names": ["images"],
        "output_names": ["probabilities"],
        "dynamic_shapes": batch,
        "dynamo": True,  # the default from torch 2.9 on
    }
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                deployed, (images[:3],), file, external_data=False, verbose=False, **names
            )
        except torch.onnx.errors.OnnxExporterError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"--onnx: PyTorch cannot export this network ({reason})") from None
        expected = deployed(images).numpy()
    session = onnxruntime.InferenceSession(file)
    (probabilities,) = session.run(None, {"images": images.numpy()})
    difference = float(abs(probabilities - expected).max())
    if difference > ONNX_ERROR:
        raise UserError(
            f"onnxruntime differs from PyTorch by {difference:.1e}: nothing was written"
        )


def export(run: str, out: Path, t: int | None = None, onnx: bool = False) -> None:
    """Write the model of a run after mega-batch `t` (None: the last one) into the directory `out`.

    It is safetensors and, with `onnx`, ONNX. UserError: the run has no such model, or a learner
    that cannot be exported; a package of `onnx` is missing; the disk is full.
    """
    if onnx:
        for package in ("onnx", "onnxscript", "onnxruntime"):
            require_package(package, "--onnx", "onnx")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from vision.deployed import load

    learner, data = load(run, t)
    name = Run.read(run).config["learner"]
    if name not in ("sm", "ens", "umix"):
        raise UserError(
            f"{name} cannot be exported: sm, ens and umix can; `alma predict` takes all"
        )
    model = learner.deployed
    averages = {"mean": "logits", "sum": "sum", None: "probabilities"}
    config = {  # read by loader.py
        "learner": name,
        "arch": learner.settings.arch,
        "members": model.members,
        "layers": _layers(model, learner.settings.arch),
        "average": averages[model.joint],
        **data.preparation,
    }
    with filled(out, "config.json", (OSError, SafetensorError)) as place:
        weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
        save_file(weights, place / "model.safetensors")
        shutil.copyfile(_LOADER, place / _LOADER.name)
        if onnx:
            write_onnx(learner, data, place / "model.onnx")
        else:  # that of another model, from before
            (out / "model.onnx").unlink(missing_ok=True)
        write_json_atomic(place / "config.json", config)
    files = "model.safetensors, model.onnx" if onnx else "model.safetensors"
    print(f"{out}: {files}, and loader.py, which loads it without ALMA")


def _layers(model: Any, arch: str) -> list[str]:
    """Paths of the layers in order; "pool" ends each block of a VGG."""
    layers = [key.removesuffix(".weight") for key in model.state_dict() if key.endswith(".weight")]
    if arch != "vgg":
        return layers
    for block in reversed(range(len(model.blocks))):
        prefix = f"blocks.{block}."
        last = max(k for k, layer in enumerate(layers) if layer.startswith(prefix))
        layers.insert(last + 1, "pool")
    return layers

"""Load the model in this folder, without ALMA: `load(FOLDER)(images)` gives probabilities."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F


def load(folder):
    """A function of images, bytes (n, channels, height, width), that gives probabilities (n, classes)."""
    config = json.loads(Path(folder, "config.json").read_text())
    weights = load_file(Path(folder, "model.safetensors"))
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    networks = [_network(config, weights, m) for m in range(config["members"])]

    def probabilities(images):
        x = (images / 255 - mean) / std
        logits = torch.stack([network(x) for network in networks])
        combined = {"probabilities": logits, "logits": logits.mean(0, True), "sum": logits.sum(0, True)}
        return combined[config["average"]].softmax(2).mean(0)

    return torch.no_grad()(probabilities)


def _network(config, weights, m):
    """Member m: normalised images (n, channels, height, width) -> logits (n, classes)."""
    if config["arch"].startswith("torchvision:"):
        from torchvision import models

        start, name = f"networks.{m}.network.", config["arch"].partition(":")[2]
        more = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
        network = models.get_model(name, weights=None, num_classes=len(config["classes"]), **more)
        network.load_state_dict({key[len(start) :]: weights[key] for key in weights if key.startswith(start)})
        network.eval()
        return lambda x: network(x.expand(-1, 3, -1, -1))

    def forward(x):
        for layer in config["layers"]:  # in order, such as blocks.0.layers.1, or classifier
            w = {key.rpartition(".")[2]: weights[key][m] for key in weights if key.startswith(f"{layer}.")}
            if "mean" in w:  # a convolution with batch normalisation
                x = F.conv2d(x, w["weight"], w["bias"], padding=1)
                x = F.batch_norm(x, w["mean"], w["variance"], w["scale"], w["shift"]).relu()
            elif not w:  # the end of a block
                x = F.max_pool2d(x, 2) if min(x.shape[2:]) > 1 else x
            else:
                x = x.mean((2, 3)) if layer == "classifier" else x.flatten(1)
                x = F.linear(x, w["weight"], w["bias"].flatten())
                x = x if layer == config["layers"][-1] else x.relu()
        return x

    return forward

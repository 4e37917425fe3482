"""Load the model in this folder, without ALMA: `load(FOLDER)(images)` gives probabilities."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F


def load(folder):
    """Load the model in `folder`.

    Returns a function from images, bytes (n, channels, height, width), to probabilities (n,
    classes).
    """
    config = json.loads(Path(folder, "config.json").read_text())
    weights = load_file(Path(folder, "model.safetensors"))
    mean = torch.tensor(config["mean"]).view(-1, 1, 1)
    std = torch.tensor(config["std"]).view(-1, 1, 1)
    networks = [_network(config, weights, m) for m in range(config["members"])]

    def probabilities(images):
        x = (images / 255 - mean) / std
        logits = torch.stack([network(x) for network in networks])
        if config["average"] == "logits":
            logits = logits.mean(0, True)
        elif config["average"] == "sum":
            logits = logits.sum(0, True)
        return logits.softmax(2).mean(0)

    return torch.no_grad()(probabilities)


def _network(config, weights, m):
    """Member m: normalised images (n, channels, height, width) -> logits (n, classes)."""
    if config["arch"].startswith("torchvision:"):
        return _of_torchvision(config, weights, m)

    def forward(x):
        for layer in config["layers"]:  # in order, such as blocks.0.layers.1, or classifier
            w = {}  # the layer's tensors by name, such as "weight"
            for key, tensor in weights.items():
                if key.startswith(f"{layer}."):
                    w[key.rpartition(".")[2]] = tensor[m]
            if "mean" in w:  # a convolution with batch normalisation
                x = F.conv2d(x, w["weight"], w["bias"], padding=1)
                x = F.batch_norm(x, w["mean"], w["variance"], w["scale"], w["shift"]).relu()
            elif w:
                x = x.mean((2, 3)) if layer == "classifier" else x.flatten(1)
                x = F.linear(x, w["weight"], w["bias"].flatten())
                if layer != config["layers"][-1]:
                    x = x.relu()
            elif min(x.shape[2:]) > 1:  # "pool", the end of a block
                x = F.max_pool2d(x, 2)
        return x

    return forward


def _of_torchvision(config, weights, m):
    """As `_network`, for a model of torchvision."""
    from torchvision import models

    name = config["arch"].partition(":")[2]
    options = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    network = models.get_model(name, weights=None, num_classes=len(config["classes"]), **options)
    prefix = f"networks.{m}.network."
    state = {}
    for key, tensor in weights.items():
        if key.startswith(prefix):
            state[key.removeprefix(prefix)] = tensor
    network.load_state_dict(state)
    network.eval()
    return lambda x: network(x.expand(-1, 3, -1, -1))

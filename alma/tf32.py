"""TF32 products of fp32, on GPUs that have them (Ampere and later).

A matrix product then rounds its fp32 inputs to 10 bits of mantissa and adds in fp32. torch is
imported where it is used, as everywhere in this package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

AMPERE = 8  # major compute capability


def is_supported(device: "torch.device") -> bool:
    """Whether the device computes TF32 products."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= AMPERE


def allow(allowed: bool) -> None:
    """Allow or forbid TF32 in products and convolutions of this process.

    By torch's older interface: the newer one is missing in 2.7, and both must not be mixed.
    """
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed

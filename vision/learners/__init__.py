"""The learners by name. A new one is a file here and a line in LEARNERS."""

from vision.learners.base import Learner
from vision.learners.ens import Ens
from vision.learners.firefly import Firefly
from vision.learners.gens import GEns
from vision.learners.gmoe import GMoE, MoE
from vision.learners.sm import SM
from vision.learners.umix import UMix

LEARNERS: dict[str, type[Learner]] = {
    "sm": SM,
    "ens": Ens,
    "umix": UMix,
    "gens": GEns,
    "gmoe": GMoE,
    "moe": MoE,
    "ff": Firefly,
}

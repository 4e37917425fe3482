"""Learners of images on a stream of mega-batches.

For example, `run(MegaBatchStream("digits"), "ens", "runs/ens")`.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

# The next import loads a module that `python -m vision.run` is about to run, which is intended.
warnings.filterwarnings("ignore", "'vision.run' found in sys.modules", RuntimeWarning, "runpy")
# The module vision.run is loaded first, so that `vision.run` is then the function.
from vision.run import run  # noqa: E402

if TYPE_CHECKING:
    from vision.data import MegaBatchStream
    from vision.own import OwnStream as Stream

__all__ = ["MegaBatchStream", "Stream", "run"]


def __getattr__(name: str) -> Any:
    """MegaBatchStream, Stream or a module, imported at its first use: the command line starts
    without torch."""
    if name in ("data", "deployed"):
        return importlib.import_module(f"vision.{name}")
    if name not in ("MegaBatchStream", "Stream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vision import own

    return own.OwnStream if name == "Stream" else own.MegaBatchStream

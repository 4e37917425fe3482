"""Packaging of ALMA: metadata, and the `.pth` file that makes fairseq find the plug-in."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PACKAGES = ("alma", "data_prep", "fairseq_alma", "slurm", "transformers_alma", "vision")
PTH = "fairseq_alma.pth"
HERE = Path(__file__).resolve().parent
INIT = (HERE / "alma/__init__.py").read_text("utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"$', INIT, re.MULTILINE)[0]

CORE = (
    *("numpy>=2", "scipy>=1.13", "matplotlib>=3.8"),
    *("msgspec>=0.20", "orjson>=3.10", "pyyaml>=6", "filelock>=3.15", "tqdm>=4.66"),
)
"""What `alma advise`, `report`, `due`, `gate` and the commands that only read need."""
CORPUS = ("sentencepiece>=0.2.2", "regex", "zstandard>=0.22")
TENSORS = ("torch>=2.7", "safetensors>=0.4.5")
FAIRSEQ = ("fairseq-fixed>=0.12.3.1,<0.13", "fairscale>=0.4.13,<0.5", "tensorboardX>=2.6")
EXTRAS = {
    # `alma data`; what reads .parquet, speaks GPT-2's BPE, and finds near duplicates.
    "corpus": [*CORPUS, "pyarrow>=17", "tokenizers>=0.20", "rensa>=0.5,<0.6"],
    # `alma train` by fairseq, and the streams that it reads.
    "text": [*TENSORS, *FAIRSEQ, *CORPUS],
    # `alma images`, `predict` and `tsne`.
    "images": [*TENSORS, "torchvision>=0.22", "scikit-learn>=1.4", "pillow>=10"],
    "cluster": ["submitit>=1.5"],
    # What loads the folders that `alma export` writes.
    "export": ["transformers>=5"],
    # The engine transformers of `alma train`, and its adapters (--lora).
    "transformers": [*TENSORS, "transformers>=5", "accelerate>=1.1"],
    "lora": ["peft>=0.17"],
    # What `alma export --onnx` writes and checks with.
    "onnx": ["onnx>=1.17", "onnxscript>=0.5", "onnxruntime>=1.20"],
}
"""What commands need beyond the core. `alma.errors.EXTRAS` names some of them to the user."""
TRACKERS = {
    # `--mlflow`; SQLAlchemy and Alembic open its SQLite files.
    "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13"],
}
"""Clients of trackers, 85 MB that two flags need: not in the extra `all`."""


class BuildWithPth(build_py):
    """Adds the experiments and the .pth file.

    Python reads .pth files at the top level of site-packages only.
    """

    def run(self) -> None:
        """Build as ever, then add them to what goes into a wheel."""
        super().run()
        if not self.editable_mode:
            self.copy_file(str(HERE / PTH), str(Path(self.build_lib, PTH)))
            self.copy_tree(str(HERE / "experiments"), str(Path(self.build_lib, "experiments")))


class EditableWithPth(editable_wheel):
    """The same for `pip install -e`, whose wheel takes nothing from `build_py`."""

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        # The one step of setuptools that is meant to add .pth files; it has no public counterpart.
        super()._install_namespaces(installation_dir, pth_prefix)
        shutil.copy2(HERE / PTH, installation_dir)


if __name__ == "__main__":
    setup(
        name="alma-macroscale",
        version=VERSION,
        description=(
            "Anytime learning at macroscale: learners on streams of mega-batches of text or images"
        ),
        license="MIT",
        python_requires=">=3.11,<3.14",
        packages=find_packages(include=[*PACKAGES, *(f"{name}.*" for name in PACKAGES)]),
        py_modules=["fairseq_alma_hook"],
        entry_points={"console_scripts": ["alma = alma.__main__:main"]},
        package_data={
            "alma": ["py.typed"],
            "alma.report.lm": ["*.csv"],
            "alma.report": ["*.html"],
            "fairseq_alma": ["*.yaml"],
            "transformers_alma": ["*.yaml"],
        },
        install_requires=CORE,
        extras_require={
            **EXTRAS,
            **TRACKERS,
            "all": sorted(set().union(*EXTRAS.values())),
            "dev": [
                *(
                    "pytest>=8",
                    "pytest-xdist>=3.6",
                    "hypothesis>=6.100",
                    "ruff>=0.12",
                    "mypy>=1.15",
                ),
                *TRACKERS["mlflow"],
                *("ipykernel>=6", "nbclient>=0.10", "nbformat>=5"),  # of the notebook's test
            ],
            "docs": ["mkdocs-material>=9.7"],
            # Needed before fairseq-fixed and fairscale are built without build isolation.
            "build": ["setuptools>=77", "wheel", "cython>=3", "uv>=0.5"],
        },
        cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableWithPth},
    )

"""Type the blocks of a page, one after the other in one folder."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.pages.blocks import BLOCKS, ROOT, Block
from tests.pages.materials import Material
from tests.pages.ways import SMALL, WAYS, Run
from tests.slurm.cluster import Cluster, missing

FAKE = ROOT / "tests/slurm/fake"
HF = """\
#!/bin/sh
# hf download MODEL FILE... --local-dir FOLDER
for folder; do :; done
mkdir -p "$folder"
cp "$HOME"/hub/* "$folder"
"""
SECONDS = 900
"""Limit of a block."""


@dataclass
class Reader:
    """Somebody who types a page's blocks in `folder`, which is the home folder, too."""

    folder: Path
    request: pytest.FixtureRequest
    makers: set[Material] = field(default_factory=set)
    left_out: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("experiments", "examples"):
            (self.folder / name).symlink_to(ROOT / name)
        programs = self.folder / ".bin"
        programs.mkdir()
        small_alma = ROOT / "tests/pages/small_alma.py"
        start = f"exec {shlex.quote(sys.executable)}"
        scripts = {"alma": f'{start} {small_alma} "$@"', "python": f'{start} "$@"'}
        for name, line in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / "python3").symlink_to("python")
        (programs / "hf").write_text(HF)
        for program in programs.iterdir():
            program.chmod(0o755)

    def environment(self, way: Run) -> dict[str, str]:
        """Variables with which a block is typed."""
        adds = [*way.adds.items(), *SMALL.items()]
        modules = [ROOT]
        if way.stand_in:
            modules = [FAKE, ROOT]
        paths = [self.folder / ".bin", Path(sys.executable).parent]
        variables = dict(os.environ)
        if way.slurm:
            variables = self._cluster().environment
        return variables | {
            "ALMA_ADDS": json.dumps(adds),
            "FAKE_PIDS": str(self.folder / ".pids"),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([*map(str, paths), variables["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, modules)),
            **way.variables,
        }

    def type(self, block: Block, way: Run) -> None:
        """Type a block; fails if it ends with another exit code, or without the words, of `way`."""
        if way.slurm and missing():
            self.left_out.append(block)
            return
        text = block.text
        for words, others in way.instead.items():
            assert words in text, (str(block), words)
            text = text.replace(words, others)
        text = text.replace("/srv/", f"{self.folder}/")
        if way.saves:
            (self.folder / way.saves).write_text(text)
            return
        variables = self.environment(way)
        self._make(way, variables["PATH"])
        shell = ["bash", "-c"]
        if way.codes == (0,):
            shell = ["bash", "-ec"]
        if block.kind == "python":
            shell = [sys.executable, "-c"]
        log = self.folder / ".log"
        with log.open("w") as output:
            code = subprocess.run(
                [*shell, text],
                cwd=self.folder / way.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            ).returncode
        said = log.read_text(errors="replace")
        assert code in way.codes, f"{block} ended with {code}:\n{text}\n{said[-4000:]}"
        for words in way.prints:
            assert words in said, f"{block} does not print {words}:\n{said[-4000:]}"

    def _make(self, way: Run, path: str) -> None:
        """Make what the block needs and the page does not have yet."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", path)
            patch.setenv("PYTHONPATH", str(ROOT))
            patch.setenv("ALMA_ADDS", "[]")
            for maker in way.needs:
                if maker not in self.makers:
                    maker(self.folder, self.request)
                    self.makers.add(maker)

    def _cluster(self) -> Cluster:
        """The SLURM of the tests, with the partitions of the pages."""
        return self.request.getfixturevalue("cluster_of_pages")


TEXT = [f"docs/{name}.md" for name in ("data", "fairseq", "language", "slurm", "time", "trainers")]
IMAGES = [f"docs/{name}.md" for name in ("advice", "images", "month", "weekly-images")]
"""Pages whose blocks take long; a file of tests is the share of one process."""
OTHERS = []
for name, ways in WAYS.items():
    is_typed = any(isinstance(way, Run) for way in ways.values())
    if is_typed and name not in (*TEXT, *IMAGES):
        OTHERS.append(name)


def type_page(page: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """Type the blocks of a page; fails with all that failed."""
    reader = Reader(folder, request)
    blocks = [block for block in BLOCKS if block.page == page]
    failures = []
    for block, way in zip(blocks, WAYS[page].values(), strict=True):
        if isinstance(way, Run):
            try:
                reader.type(block, way)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n\n".join(failures)
    if reader.left_out:
        pytest.skip(f"no SLURM is installed: {', '.join(map(str, reader.left_out))} did not run")

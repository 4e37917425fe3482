"""Training speed and peak memory of whole fairseq-train processes, against fairseq's dense Transformer.

The paper's base model with 8 experts, with cross_entropy and with chunked_cross_entropy, against
transformer_lm with as many active parameters. All train on the same blocks of random tokens: 3 sequences of
512 tokens per update, V = 50,264, dropout 0.1; fp32 on the CPU, one thread each. Peak memory is that of the
process (VmHWM), Python and its libraries included.

All processes start together. After the warm-up they take turns: one runs an update, the others are halted.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from tqdm import tqdm

from alma.errors import UserError
from alma.flops import ARCHS, Arch, Shape
from alma.processes import resident_memory
from benchmarks.streams import write_stream
from benchmarks.timing import Rows, spread

WARM_UP = 1  # updates; it allocates Adam's state
LAYERS, DIM, _ = ARCHS["switch_gmoe_base"]
SWITCH = Shape(LAYERS, DIM, 4 * DIM, vocabulary=50_264, positions=512, experts=8, moe_freq=2)
DENSE = replace(SWITCH, experts=0)


def dense_flags(arch: Arch) -> str:
    """transformer_lm with as many active parameters as the plug-in's `arch`."""
    return (
        f"--task language_modeling --arch transformer_lm --decoder-layers {arch.layers} "
        f"--decoder-embed-dim {arch.dim} --decoder-ffn-embed-dim {4 * arch.dim} "
        f"--decoder-attention-heads {arch.heads} --activation-fn gelu --decoder-normalize-before "
        "--decoder-learned-pos --share-decoder-input-output-embed"
    )


SWITCH_FLAGS = f"--task alma_lm --arch switch_gmoe_base --moe-expert-count {SWITCH.experts}"
MODELS = (  # --arch, its flags, what it is, --criterion
    ("transformer_lm", dense_flags(ARCHS["switch_gmoe_base"]), DENSE, "cross_entropy"),
    ("switch_gmoe_base", SWITCH_FLAGS, SWITCH, "cross_entropy"),
    ("switch_gmoe_base", SWITCH_FLAGS, SWITCH, "chunked_cross_entropy"),
)
COMMON = (
    "--tokens-per-sample 512 --batch-size 3 --dropout 0.1 --optimizer adam --adam-betas (0.9,0.98) "
    "--adam-eps 1e-8 --lr 2e-4 --num-workers 0 --no-save --disable-validation --log-format json "
    "--log-interval 1"
)
_UPDATE = " | train_inner | "


class PausedTraining:
    """A fairseq-train process that only runs during `run`; leaving the context ends it."""

    def __init__(self, command: Sequence[str]):
        self.log: list[str] = []
        self.lead = 0.0  # seconds that the next update has already run
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            process_group=0,  # if this process is killed, the kernel sends SIGHUP to the halted group
        )

    def __enter__(self) -> "PausedTraining":
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # waits
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)

    def run(self, updates: int) -> float:
        """Run `updates` updates, then halt; returns tokens per second. UserError: the process ended.

        The next update has begun by then; its time counts towards the next run.
        """
        started = time.perf_counter()
        self.process.send_signal(signal.SIGCONT)
        tokens = 0
        for _ in range(updates):
            line = next((line for line in self._lines() if _UPDATE in line), None)
            if line is None:
                tail = " ".join(line[:200] for line in self.log[-3:])
                raise UserError(f"fairseq-train ended with exit code {self.process.wait()}: {tail}")
            tokens += int(json.loads(line.split(_UPDATE)[1])["wpb"])
        done = time.perf_counter()
        self.process.send_signal(signal.SIGSTOP)
        seconds, self.lead = self.lead + done - started, time.perf_counter() - done
        return tokens / seconds

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout
        for line in self.process.stdout:
            self.log.append(line)
            yield line


def turns(trainings: Sequence[PausedTraining], repeats: int) -> list[list[float]]:
    """(repeats, trainings) tokens per second: one update each per turn, starting with another each time."""
    speeds = []
    for turn in tqdm(range(repeats), disable=None, unit="turn"):
        order = sorted(range(len(trainings)), key=lambda i: (i - turn) % len(trainings))
        measured = {i: trainings[i].run(1) for i in order}
        speeds.append([measured[i] for i in range(len(trainings))])
    return speeds


def measure(repeats: int) -> Rows:
    """A row per model."""
    pool = ThreadPoolExecutor(len(MODELS))
    with tempfile.TemporaryDirectory() as directory, pool, ExitStack() as stack:
        write_stream(Path(directory), 10**6, item=70, vocabulary=SWITCH.vocabulary - 4)  # more than is read
        common = f"{COMMON} --save-dir {directory}/none --max-update {repeats + WARM_UP + 1}".split()
        program = [sys.executable, "-m", "fairseq_cli.train", directory]
        trainings = [
            stack.enter_context(PausedTraining([*program, *flags.split(), "--criterion", criterion, *common]))
            for _, flags, _, criterion in MODELS
        ]
        for warm_up in as_completed(pool.submit(training.run, WARM_UP) for training in trainings):
            warm_up.result()  # raises the first error
        speeds = turns(trainings, repeats)
        peaks = [resident_memory(training.process.pid, peak=True) for training in trainings]
    return [
        {
            "arch": arch,
            "criterion": criterion,
            "parameters": f"{shape.parameters / 1e6:.1f}M",
            "active": f"{replace(shape, experts=min(shape.experts, 1)).parameters / 1e6:.1f}M",
            "tokens/s": round(median(speed[i] for speed in speeds)),
            f"speed / {MODELS[0][0]}": spread([speed[i] / speed[0] for speed in speeds]),
            "peak MB": round(peaks[i] / 1e6),
        }
        for i, (arch, _, shape, criterion) in enumerate(MODELS)
    ]

"""A process as one of several of a training: its launcher, signals and environment variables.

Imports nothing large: a worker calls `begin` before it imports torch.
"""

import ctypes
import os
import signal
from collections.abc import MutableMapping

from alma.processes import PR_SET_PDEATHSIG

LAUNCHER = "ALMA_LAUNCHER"
"""Environment variable of a worker: the process id of the launcher that started it."""
STOP_FILE = "ALMA_STOP_FILE"
"""Environment variable of a worker: the file that its launcher makes to stop the training."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "TORCHELASTIC_")
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_OF_MPI = ("PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL")
_OTHERS = ("MASTER_ADDR", "MASTER_PORT", "PYTHON_EXEC")
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def is_worker() -> bool:
    """Whether a launcher started this process as one of several."""
    return LAUNCHER in os.environ


def clean(environment: MutableMapping[str, str]) -> None:
    """Remove variables of other launchers, such as torchrun or MPI: only flags decide."""
    for name in list(environment):
        is_set_by_others = name.startswith((*_OF_LAUNCHERS, *_OF_MPI))
        if is_set_by_others or name in (*_OF_RANKS, *_OTHERS):
            del environment[name]


def use_one_gpu(environment: MutableMapping[str, str]) -> None:
    """Hide all GPUs but the first; the Trainer would divide each batch among them (DataParallel).

    Call it before CUDA starts.
    """
    environment[_VISIBLE_GPUS] = environment.get(_VISIBLE_GPUS, "0").partition(",")[0]


def begin() -> None:
    """Die with the launcher, and leave signals to it: SLURM sends them to all processes of a job.

    The launcher blocks them at the start of a worker, so that none is lost before this call.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):  # it died before the call above
        os._exit(1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

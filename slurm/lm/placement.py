"""The processes of a training, and how they share the batch of an update.

The batch is the user's: --batch-size (or --max-tokens) x --update-freq x --distributed-world-size. If the
machine has another number of GPUs, --update-freq changes so that the batch stays. Without
--distributed-world-size the batch follows from the first machine of a run, and the run keeps it.
"""

from dataclasses import replace

from alma.errors import UserError
from alma.records import Run
from slurm.engine.machine import Machine
from slurm.lm.settings import Placement, Request, tokens_of_batch


def place(request: Request, machine: Machine) -> Request:
    """The request with its `placement` on a machine.

    Raises UserError if the processes cannot share the batch of an update evenly.
    """
    settings = request.settings
    freq = settings["--update-freq"]
    batch = tokens_of_batch(settings)
    asked = settings["--distributed-world-size"]
    earlier = None if asked or batch is None else _processes_before(request, batch * freq[0])
    gpus = 0 if settings["--cpu"] else len(machine.gpus)
    processes = _processes(asked or earlier, gpus, machine.tasks)
    wanted = asked or earlier or processes
    fewer = max(n for n in range(1, processes + 1) if not any(each * wanted % n for each in freq))
    if fewer < processes:
        if not earlier or machine.tasks:
            raise UserError(_uneven(request, freq[0], wanted, processes, fewer))
        processes = fewer  # a run in progress goes on, on some of the GPUs
    shared = [each * wanted // processes for each in freq]
    tokens = batch and batch * freq[0] * wanted
    made = Placement(processes, processes if gpus else 0, tokens, by_machine=not asked and wanted > 1)
    values = {"--distributed-world-size": processes, "--update-freq": shared}
    return replace(request, settings={**settings, **values}, placement=made)


def _processes(wanted: int | None, gpus: int, tasks: int | None) -> int:
    """Processes on `gpus`, in a SLURM job of `tasks` (None: on this machine), if a user wants as many."""
    if tasks is None:
        return min(wanted or gpus, gpus) if gpus else wanted or 1
    if gpus:
        return gpus
    return tasks if tasks > 1 else wanted or 1


def _processes_before(request: Request, tokens: int) -> int | None:
    """Processes with `tokens` each that have the batch of the run in --out; None: it has trained nothing."""
    if not (request.out / "run.json").exists() or not (run := Run.read(request.out)).trained:
        return None
    if "tokens_per_update" not in run.info:  # of an older version
        return len((run.info.get("machine") or {}).get("gpus") or []) or None
    before = run.info["tokens_per_update"]
    same = isinstance(before, int) and before % tokens == 0
    return before // tokens if same else None


def _uneven(request: Request, freq: int, wanted: int, processes: int, fewer: int) -> str:
    passes = freq * wanted
    other = f"`-- --distributed-world-size {fewer} --update-freq {passes // fewer}` on {fewer} of them"
    size = request.settings["--batch-size"]
    for smaller in range((size or 1) - 1, 0, -1):
        if size * passes % (smaller * processes) == 0:
            words = f"--batch-size {smaller} --update-freq {size * passes // (smaller * processes)}"
            other += f", or `-- {words} --distributed-world-size {processes}`"
            break
    if (request.out / "run.json").exists():
        other = f"GPUs for {fewer} processes, or, for a new run, {other}"
    return (
        f"{processes} processes cannot share the {passes} batches of an update (--update-freq "
        f"{freq} x --distributed-world-size {wanted}) evenly; for the same update give {other}"
    )

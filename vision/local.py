"""Runs of images on this machine, in several processes."""

import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from alma.errors import UserError
from vision import shared
from vision.sweep import SweepRun


def run_all(jobs: Sequence[SweepRun], processes: int) -> list[Exception]:
    """Run the jobs in processes of one thread each; returns the errors of those that failed.

    Processes take the GPUs in turn. A single job runs in this process; if it is an MLP, which gains
    nothing from more threads, in one thread unless OMP_NUM_THREADS is set. Raises UserError if the
    system killed a process.
    """
    if not jobs:  # an empty part of a sweep
        return []
    if len(jobs) == 1:
        if jobs[0].settings.arch == "mlp" and "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(1)
        jobs[0].run()
        return []
    _download(jobs)
    return _run_in_processes(jobs, processes)


def _download(jobs: Sequence[SweepRun]) -> None:
    """Download each data set once, before several processes would."""
    downloads = {tuple(job.dataset.items()) for job in jobs if job.dataset.get("download")}
    if downloads:
        from vision.data import load

        for dataset in downloads:
            load(**dict(dataset))


def _run_in_processes(jobs: Sequence[SweepRun], processes: int) -> list[Exception]:
    """Run several jobs, print the outcome of each; returns the errors of those that failed."""
    from alma.workers import Workers

    failed: list[Exception] = []
    began = time.monotonic()
    setup = partial(_prepare, jobs[0].options["device"])
    with (
        shared.folder() as place,
        Workers(processes, setup, flag="--jobs") as workers,
    ):
        tasks = [(_with_shared_data(job, place),) for job in jobs]
        results = workers.run(SweepRun.run, tasks)
        for done, (number, result) in enumerate(results, start=1):
            name = jobs[number].out.name
            outcome = "done"
            try:
                result()
            except Exception as error:
                outcome = "failed"
                failed.append(_reported(error, name))
            seconds_per_job = (time.monotonic() - began) / done
            minutes = seconds_per_job * (len(jobs) - done) / 60
            print(
                f"{done}/{len(jobs)}  {name}: {outcome}  (about {minutes:.0f} min left)",
                flush=True,
            )
    return failed


def _with_shared_data(job: SweepRun, place: Path) -> SweepRun:
    """The job with its images mapped from files in `place`, which its processes share.

    Images in folders have a cache of their own, unless --cache-images is given.
    """
    if job.dataset["name"] == "folder" or job.source:
        if job.dataset.get("cache_images"):
            return job
        return replace(job, dataset=job.dataset | {"cache_images": str(place)})
    return replace(job, shared=place)


def _reported(error: Exception, name: str) -> Exception:
    """Return the error to show for the run `name`.

    A UserError is returned as it is. Another error is a bug: its traceback is printed, and the
    returned error names the run and the error in one line.
    """
    if isinstance(error, UserError):
        return error
    traceback.print_exception(error)
    return RuntimeError(f"{name}: {type(error).__name__}: {error}")


def _prepare(device: str, number: int) -> None:
    """Set up worker process `number`: one thread, and the next GPU."""
    import torch

    torch.set_num_threads(1)  # idle OpenMP threads spin, and would slow other runs down
    if device in ("auto", "cuda"):
        gpus = torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(number % gpus)

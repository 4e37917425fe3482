"""The jobs of a run: evaluate the untrained model, train each model of a stage, evaluate the stage,
and test earlier models on mega-batches that came later.

Each job writes its marker (untrained.json, trained.json, result.json or late/*.json) atomically and
last. A training that is restarted before that resumes from its last checkpoint.
"""

import os
import secrets
import shlex
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alma import averages
from alma.errors import UserError
from alma.files import make_directory, patiently_locked, write_json_atomic
from alma.markers import read_marker
from alma.records import Run
from alma.stream import Stream, is_stream
from slurm.engine import children
from slurm.engine.children import Environment, Watch
from slurm.engine.jobs import Job
from slurm.lm import trainer
from slurm.lm.late import (
    LateTest,
    check_length,
    late_test,
    late_tests,
    on_held_out,
    plan_as_recorded,
    untested,
)
from slurm.lm.meeting import words_of_node, words_of_task
from slurm.lm.plan import Plan
from slurm.lm.planned import StageSpec, Training, program_command
from slurm.lm.record import (
    LATE_LOG,
    RESULT,
    SCORES,
    TRAINED,
    UNTRAINED,
    collect,
    late_folder,
    read_scores,
)
from slurm.lm.sharing import take_over

TRAIN_LOG = "train.log"  # of the process or node that writes the marker


@dataclass(frozen=True, kw_only=True)
class RunJob(Job):
    """A job of a planned run, for SLURM or for this machine."""

    plan: Plan
    index: int = 0

    @property
    def spec(self) -> StageSpec:
        return self.plan.stages[self.index]

    def model_of(self, directory: Path) -> Path:
        """The checkpoint that the training in `directory` chose at its end.

        Raises UserError if it is missing.
        """
        marker = directory / TRAINED
        model = directory / read_marker(marker)["checkpoint"] if marker.exists() else marker
        if not model.exists():
            remedy = (
                f"restore it, or delete {directory} and rerun the command to train that stage again"
            )
            raise UserError(f"{model}: missing, and a later job needs this training: {remedy}")
        return model

    @abstractmethod
    def do(self, environment: Environment = None, watch: Watch = None) -> None:
        """Do the rest of the job on this machine."""

    def work(self) -> None:
        self.do()
        with patiently_locked(self.run):
            run = Run.open(self.run, Run.read(self.run).config)
            collect(plan_as_recorded(self.plan, run), run)


@dataclass(frozen=True, kw_only=True)
class TrainJob(RunJob):
    kind: str = "train"
    training: Training

    def do(
        self,
        environment: Environment = None,
        watch: Watch = None,
        arguments: Sequence[str] | None = None,
        log: str = TRAIN_LOG,
    ) -> None:
        """Train to the end, or link the checkpoints of an equal training of another run.

        arguments: arguments of fairseq-train for this process of a distributed training, or of the
        program of `engines` for this node; None: this process trains alone, or starts the others.
        log: name of the log; each process of a distributed training has its own, and the one with
        train.log writes the marker.
        """
        if self.done:
            return
        if self.training.source:
            take_over(self.training.source, self.directory)
            return
        check_length(self.plan, self.spec)
        make_directory(self.directory)
        if self.training.program:
            self._train_by_program(self.directory / log, arguments or [], environment, watch)
            return
        if arguments is None:
            arguments = self._joined(1, 0, secrets.token_hex(8), "localhost")
        command = [*self.training.command, *arguments]
        if self.training.previous:
            command += ["--finetune-from-model", str(self.model_of(self.training.previous))]
        children.run(command, self.directory / log, f"training of {self.name}", watch, environment)
        if log == TRAIN_LOG:
            marker: dict[str, Any] = {"checkpoint": self._chosen_checkpoint()}
            if averages.last_of(self.plan.request.average):  # an average of fewer would be another
                marker["averaged"] = sorted(
                    path.name for path in self.directory.glob("checkpoint_*.pt")
                )
            write_json_atomic(self.marker, marker)

    def _train_by_program(
        self, log: Path, arguments: Sequence[str], environment: Environment, watch: Watch
    ) -> None:
        """Train by a program of `engines`; the first node writes the marker."""
        checkpoint = None
        if self.training.previous:
            checkpoint = self.model_of(self.training.previous)
        task = trainer.training_of(self.plan, self.spec, self.training, checkpoint)
        *program, stage_file = self.training.command
        command = [*program, *arguments, stage_file]
        name = f"training of {self.name}"
        if log.name != TRAIN_LOG:
            trainer.take_part(task, command, log, name)
            return
        answer = trainer.answer(task, command, log, name, watch, environment)
        write_json_atomic(self.marker, trainer.marker(task, answer))

    def _chosen_checkpoint(self) -> str:
        """The checkpoint to deploy and continue: the best by validation.

        With one schedule over all stages it is the last one.
        """
        best = "checkpoint_best.pt"
        if self.plan.request.one_schedule or not (self.directory / best).exists():
            return "checkpoint_last.pt"
        return best

    def work(self) -> None:
        from submitit import JobEnvironment

        job = JobEnvironment()
        attempt = f"{job.raw_job_id}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        if self.training.program:
            arguments = words_of_node(job.num_tasks, job.global_rank, attempt)
        else:
            host = "localhost" if job.num_nodes == 1 else None
            arguments = self._joined(job.num_tasks, job.global_rank, attempt, host)
        if job.global_rank:
            self.do(arguments=arguments, log=f"train.rank{job.global_rank}.log")
            return
        if not self.done:  # a folder would mean that the stage has been trained
            check_length(self.plan, self.spec)
        make_directory(self.directory)
        # A job that SLURM declared dead may still be running.
        with patiently_locked(self.directory):
            self.do(arguments=arguments)

    def _joined(self, tasks: int, task: int, attempt: str, host: str | None) -> list[str]:
        """Flags of fairseq-train by which its processes meet (`meeting.words_of_task`)."""
        placement = self.plan.request.placement
        if not placement:
            return []
        return words_of_task(self.directory, placement, tasks, task, attempt, host)


@dataclass(frozen=True, kw_only=True)
class EvaluateJob(RunJob):
    """Evaluate the untrained model, or those deployed after a stage; `kind` says which."""

    alone: bool = True

    def do(self, environment: Environment = None, watch: Watch = None) -> None:
        if self.done:
            return
        if self.kind == "untrained":
            log = self.directory / "untrained.log"
            name = "evaluation of the untrained model"
            self._evaluate(self.plan.untrained, [], log, name, environment, watch)
            return
        models = [self.model_of(directory) for directory in self.spec.models]
        # Run before result.json is written, so that a failure of the user's program leaves no row.
        if self.plan.request.evaluate and not (self.directory / SCORES).exists():
            self._score(models, environment)
        log = self.directory / "eval.log"
        self._evaluate(self.spec.evaluate, models, log, self.name, environment, watch)

    def _score(self, models: Sequence[Path], environment: Environment) -> None:
        """Run the program of --evaluate and keep the numbers of its last line."""
        log = self.directory / "scores.log"
        lines = [""]
        words = [*shlex.split(self.plan.request.evaluate or ""), *map(str, models)]
        children.run(words, log, f"--evaluate of {self.name}", lines.append, environment)
        write_json_atomic(self.directory / SCORES, read_scores(lines[-1].encode(), log))

    def _evaluate(
        self,
        command: Sequence[str],
        models: Sequence[Path],
        log: Path,
        name: str,
        environment: Environment,
        watch: Watch,
    ) -> None:
        """Evaluate `models` (none: the untrained model) by fairseq or a program of `engines`."""
        if self.plan.request.by_fairseq:
            paths = ["--path", ":".join(map(str, models))] if models else []
            children.run([*command, *paths], log, name, watch, environment)
            return
        task = trainer.evaluation_of(self.plan, self.spec if models else None, models)
        answer = trainer.answer(task, command, log, name, watch, environment)
        costs = []
        if models:
            costs = [read_marker(model / TRAINED)["training"] for model in self.spec.models]
        measured = trainer.measured(self.plan, task, answer, costs)
        write_json_atomic(self.marker, measured)
        trainer.remove_documents(task, answer)

    def work(self) -> None:
        make_directory(self.directory)
        # A job that SLURM declared dead may still be running.
        with patiently_locked(self.directory, f".{self.kind}.lock"):
            super().work()
        if self.plan.request.test_past == 0 or not is_stream(self.plan.request.stream):
            return
        # A mega-batch that came during the evaluation: a launch for it saw no result yet.
        last = len(Stream.load(self.plan.request.stream).held_out)
        stage = None if self.kind == "untrained" else self.index
        test = late_test(self.plan, stage, last)
        if test and not test.lacking:
            late_job(self.plan, test).work()


@dataclass(frozen=True, kw_only=True)
class LateJob(RunJob):
    """Test the untrained model, or those deployed after a stage, on held-out parts that came
    later."""

    kind: str = "late"
    test: LateTest
    alone: bool = True

    def do(self, environment: Environment = None, watch: Watch = None) -> None:
        if self.done:
            return
        make_directory(self.directory)
        with patiently_locked(self.directory):  # two launches may have asked for the same part
            missing = untested(self.plan, self.test.stage, self.test.megabatches)
            if missing:
                self._test_on(missing, environment, watch)
            else:
                write_json_atomic(self.marker, {"held_out": []})

    def _test_on(self, parts: Sequence[int], environment: Environment, watch: Watch) -> None:
        """Test on the held-out parts of the mega-batches `parts`, and write the marker."""
        request = self.plan.request
        stage = self.test.stage
        models: list[Path] = []
        if stage is not None:
            models = [self.model_of(directory) for directory in self.spec.models]
        log = self.directory / LATE_LOG
        if request.program:
            spec = None if stage is None else self.spec
            began = time.monotonic()
            folder = self.directory / self.marker.stem
            command = program_command(request.program, folder)
            task = trainer.test_of(self.plan, spec, models, parts, command)
            answer = trainer.answer(task, command, log, self.name, watch, environment)
            cells = trainer.measured_parts(self.plan, task, answer, parts)
            seconds = time.monotonic() - began
            write_json_atomic(self.marker, {"held_out": cells, "seconds": seconds})
            trainer.remove_documents(task, answer)
            return
        paths = ["--path", ":".join(map(str, models))] if models else []
        evaluation = self.plan.untrained if stage is None else self.spec.evaluate
        words = [*on_held_out(evaluation, parts, self.marker), *paths]
        children.run(words, log, self.name, watch, environment)


def late_job(plan: Plan, test: LateTest) -> LateJob:
    """The job of a late evaluation; its marker has the number of the last mega-batch."""
    folder = late_folder(plan, test.stage)
    last = f"{test.megabatches[-1]:04d}"
    marker = folder / f"{last}.json"
    number = 1
    while marker.exists():  # losses by document are measured again
        number += 1
        marker = folder / f"{last}_{number}.json"
    return LateJob(
        plan=plan,
        run=plan.out,
        index=test.stage or 0,
        name=f"test of {test.model} on {test.periods}",
        array="alma-late",
        directory=folder,
        marker=marker,
        test=test,
    )


def late_jobs(plan: Plan) -> list[LateJob]:
    """The late evaluations that a run lacks; of models that are there."""
    return [late_job(plan, test) for test in late_tests(plan) if not test.lacking]


def jobs_of(plan: Plan) -> list[RunJob]:
    """All jobs of a run in a possible order of execution: late evaluations first.

    Of a plan that only tests what is trained: late evaluations, and jobs that are complete.
    """
    late = late_jobs(plan)
    of_stages = _jobs_of_stages(plan)
    if plan.tests_only:
        of_stages = [job for job in of_stages if job.done]
    return [*late, *of_stages]


def _jobs_of_stages(plan: Plan) -> list[RunJob]:
    """The evaluation of the untrained model, and the trainings and evaluations of all stages."""
    out = plan.out
    untrained: dict[str, Any] = {
        "name": "untrained",
        "kind": "untrained",
        "array": "alma-untrained",
    }
    jobs: list[RunJob] = [
        EvaluateJob(plan=plan, run=out, directory=out, marker=out / UNTRAINED, **untrained)
    ]
    for index, spec in enumerate(plan.stages):
        shared: dict[str, Any] = {"plan": plan, "run": out, "index": index}
        count = len(spec.trainings)
        for number, training in enumerate(spec.trainings):
            of = f", member {number + 1} of {count}" if count > 1 else ""
            needed = training.source or training.previous
            job = TrainJob(
                name=f"stage {index}{of}",
                array=f"alma-stage{index}-shared" if training.source else f"alma-stage{index}",
                directory=training.directory,
                marker=training.directory / TRAINED,
                needs=(needed / TRAINED,) if needed else (),
                updates=training.updates and training.updates + training.earlier,
                alone=training.source is not None,
                training=training,
                **shared,
            )
            jobs.append(job)
        evaluation = EvaluateJob(
            name=f"evaluation of stage {index}",
            kind="evaluate",
            array=f"alma-evaluate{index}",
            directory=spec.directory,
            marker=spec.directory / RESULT,
            needs=tuple(model / TRAINED for model in spec.models),
            **shared,
        )
        jobs.append(evaluation)
    return jobs


def in_submission_order(jobs: Sequence[RunJob]) -> list[RunJob]:
    """Jobs of several runs: late evaluations, untrained models, trainings by stage, evaluations by
    stage."""
    kinds = ("late", "untrained", "train", "evaluate")
    return sorted(jobs, key=lambda job: (kinds.index(job.kind), job.index))

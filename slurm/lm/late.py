"""Late evaluations: which models of a run are to be tested on held-out parts that came later.

A stream grows by `alma data ... --append`. The untrained model and the deployed ones of earlier
stages are then tested on the new held-out parts, before anything is trained.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alma import averages
from alma.errors import UserError
from alma.evaluations import HELD_OUT, item_losses_file
from alma.markers import read_marker
from alma.records import Run
from alma.stages import stages
from alma.stream import Stream, is_stream
from alma.tables import number
from slurm.engine.machine import Machine
from slurm.lm.estimate import Cost, total
from slurm.lm.plan import Plan, Request, make_plan
from slurm.lm.planned import StageSpec
from slurm.lm.record import (
    LATE,
    TRAINED,
    measured_cells,
    read_late_record,
    read_measured,
    result_of,
    run_config,
)


@dataclass(frozen=True)
class LateTest:
    """A model, and the held-out parts that it is to be tested on."""

    stage: int | None  # the last one of the model; None: it is untrained
    megabatches: tuple[int, ...]  # ascending
    periods: str  # such as 2024-06 to 2024-07, or mega-batch 7
    tokens: int
    lacking: str = ""  # a file of the model that is deleted: it cannot be tested

    @property
    def model(self) -> str:
        return "untrained model" if self.stage is None else f"stage {self.stage}"

    @property
    def hole(self) -> str:
        """Why these cells of the evaluation matrix stay empty."""
        return f"{self.model}: {self.lacking} is deleted: not tested on {self.periods}"


def plan_on_longer(request: Request, megabatches: int) -> Plan:
    """The plan of a run on a stream of B = `megabatches`, some of which came after its request.

    A list of --grow-experts may end before them: stages beyond it are not to be trained by this
    plan, and get one expert.
    """
    growth = request.grow_experts
    steps = len(stages(megabatches, request.waiting_time)) - 1
    if growth and 1 < len(growth) < steps:
        request = replace(request, grow_experts=[*growth, *[1] * (steps - len(growth))])
    return make_plan(request, megabatches)


def plan_as_recorded(plan: Plan, run: Run) -> Plan:
    """The plan of a job, or that of a later launch if the stream has grown since."""
    megabatches = run.config["megabatches"]
    if megabatches <= plan.config["megabatches"]:
        return plan
    request = replace(plan.request, stages=run.info.get("stages"), sizes=())
    return plan_on_longer(request, megabatches)


def check_length(plan: Plan, spec: StageSpec) -> None:
    """UserError: a stage was to end early with its stream, which has grown since it was planned."""
    if not is_stream(plan.request.stream):
        return
    megabatches = len(Stream.load(plan.request.stream).megabatches)
    last = min((spec.stage.index + 1) * plan.request.waiting_time, megabatches)
    if spec.stage.last < last:
        planned = f"stage {spec.stage.index} was planned to end with mega-batch {spec.stage.last}"
        grown = f"the stream has grown, and now it would end with {last}"
        raise UserError(f"{plan.out}: {planned}; {grown}: rerun the launch command")


def late_tests(plan: Plan) -> list[LateTest]:
    """What is missing of the evaluation matrix of the models that are evaluated, the newest first.

    With --test-past N, of the newest N stages alone. UserError: a file of the run is damaged.
    """
    if not plan.request.sizes or not is_stream(plan.request.stream):  # --dry-run --megabatches
        return []
    held_out = Stream.load(plan.request.stream).held_out[: plan.config["megabatches"]]
    if not held_out or not Run.check(plan.out, *run_config(plan)):
        return []
    evaluated: list[int | None] = []
    for spec in reversed(plan.stages):
        if result_of(plan, spec.stage.index).exists():
            evaluated.append(spec.stage.index)
    if result_of(plan, None).exists():
        evaluated.append(None)
    tests = []
    for stage in evaluated[: plan.request.test_past]:
        test = late_test(plan, stage, len(held_out))
        if test:
            tests.append(test)
    return tests


def late_test(plan: Plan, stage: int | None, last: int) -> LateTest | None:
    """What a model's row of the evaluation matrix lacks up to mega-batch `last`; None: nothing."""
    lacking = "" if stage is None else _lacking(plan, stage)
    missing = untested(plan, stage, range(1, last + 1), with_losses=not lacking)
    if not missing:
        return None
    held_out = Stream.load(plan.request.stream).held_out
    parts = [held_out[megabatch - 1] for megabatch in missing]
    return LateTest(
        stage=stage,
        megabatches=missing,
        periods=_span([part.period or str(t) for t, part in zip(missing, parts, strict=True)]),
        tokens=sum(part.tokens for part in parts),
        lacking=lacking,
    )


def untested(
    plan: Plan, stage: int | None, megabatches: Collection[int], with_losses: bool = True
) -> tuple[int, ...]:
    """Those of the mega-batches on whose held-out parts a model was not tested.

    with_losses: `alma test` also counts those whose losses by document are missing, as in runs of
    earlier versions of ALMA.
    """
    tested = {cell["megabatch"] for cell in measured_cells(plan, stage)}
    run = Run.read(plan.out)
    for cell in run.late_evaluations:
        if cell["stage"] == stage:
            tested.add(cell["megabatch"])
    if with_losses and stage is not None and plan.tests_only and _has_losses(plan):
        tested = {t for t in tested if item_losses_file(plan.out, stage, t).exists()}
    return tuple(megabatch for megabatch in megabatches if megabatch not in tested)


def _has_losses(plan: Plan) -> bool:
    """Whether evaluations write losses by document; the user's own trainer may return none."""
    return plan.request.by_fairseq or (plan.out / HELD_OUT).exists()


def on_held_out(command: Sequence[str], parts: Sequence[int], out: Path) -> list[str]:
    """The command line of a whole evaluation, on the held-out parts of `parts` alone, to `out`."""
    words = [word for word in command if word != "--valid"]
    words[words.index("--out") + 1] = str(out)
    return [*words, "--held-out", ",".join(map(str, parts))]


def _span(names: list[str]) -> str:
    """The first and the last of the names; mega-batches have numbers."""
    if names[0].isdigit() and len(names[0]) < 4:  # a year is a period
        names = [f"mega-batch {name}" for name in names]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _lacking(plan: Plan, stage: int) -> str:
    """A file that the models deployed after a stage lack; "" if there is none."""
    for directory in plan.stages[stage].models:
        if not (directory / TRAINED).exists():
            return TRAINED
        marker = read_marker(directory / TRAINED)
        files = [marker["checkpoint"]]
        if averages.last_of(plan.request.average):
            files += marker.get("averaged", ["checkpoint_last.pt"])
        for name in files:
            if not (directory / name).exists():
                return Path(name).name
    return ""


def announcement(plan: Plan, vocabulary: int | None, machine: Machine) -> list[str]:
    """Lines about the late evaluations of a run: how many, their cost, and those impossible.

    vocabulary: of dict.txt.
    """
    tests = late_tests(plan)
    lines = []
    possible = [test for test in tests if not test.lacking]
    if possible:
        tokens = sum(test.tokens for test in possible)
        parts = sum(len(test.megabatches) for test in possible)
        models = "1 model is" if len(possible) == 1 else f"{len(possible)} models are"
        evaluations = "1 evaluation" if parts == 1 else f"{parts} evaluations"
        processes = "1 process" if len(possible) == 1 else f"{len(possible)} processes"
        when = "" if plan.tests_only else "before any training, "
        text = f"{plan.out}: {when}{models} tested on what arrived"
        text += f": {evaluations}, {tokens:,} tokens"
        flops = [_flops(plan, test, vocabulary, machine) for test in possible]
        whole = total(flops)
        if whole is not None:
            text += f", {number(whole / 1e12)} TFLOPs"
        seconds = _seconds(plan, tokens)
        if seconds is not None:
            text += f", about {seconds:,.0f} s and the start of {processes}"
        lines.append(text)
    holes = [test for test in tests if test.lacking]
    lines += [f"{plan.out}: {test.hole}" for test in holes]
    if len(holes) > 1:
        lines.append(f"{plan.out}: {len(holes)} models are deleted and cannot be tested")
    return lines


def _flops(plan: Plan, test: LateTest, vocabulary: int | None, machine: Machine) -> int | None:
    """FLOPs of a late evaluation; None: unknown."""
    if not plan.request.by_fairseq:  # evaluations of programs are by token
        measured = read_measured(result_of(plan, test.stage))
        return int(measured["eval_flops_per_example"] * test.tokens)
    spec = plan.stages[test.stage or 0]
    models = len(spec.trainings) if test.stage is None else len(spec.models)
    cost = Cost(spec.directory, spec.settings, vocabulary, machine)
    if cost.shape is None:
        return None
    return cost.shape.forward_flops(test.tokens) * models


def _seconds(plan: Plan, tokens: int) -> float | None:
    """Time for `tokens`, at the speed of earlier late evaluations of the run; None: there are none.

    They may have been of other models, or on another machine.
    """
    seconds = 0.0
    tested = 0
    for file in plan.out.glob(f"**/{LATE}/*.json"):
        record = read_late_record(file)
        seconds += record.get("seconds", 0)
        tested += sum(cell.get("tokens", 0) for cell in record["held_out"])
    return seconds / tested * tokens if seconds and tested else None

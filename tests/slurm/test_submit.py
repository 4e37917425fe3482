"""Jobs of a launch, their arrays and dependencies, without SLURM."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from launcher import SMALL, read_requests

from alma.errors import UserError
from slurm.engine import children, queue, squeue, submission
from slurm.engine.resources import Resources
from slurm.engine.submission import record, submit
from slurm.lm.plan import make_plan
from slurm.lm.stage import in_submission_order, jobs_of

FLAGS = (*SMALL, "--max-update", "4")


def plans(tmp_path, *learners: str, megabatches: int = 3):
    """Plans of "LEARNER OPTIONS", each in a folder of that name."""
    run_plans = []
    for words in learners:
        learner, *options = words.split()
        out = tmp_path / words.replace(" ", "")
        arguments = ["stream", "--learner", learner, "--out", str(out), *options, "--", *FLAGS]
        run_plans += [make_plan(request, megabatches) for request in read_requests(arguments)]
    return run_plans


class Sent:
    """Stand-in for SLURM that records submissions."""

    def __init__(self):
        self.jobs: list[tuple[str, list[str], str | None]] = []

    def __call__(self, name, jobs, resources, dependency):
        number = len(self.jobs) + 1
        self.jobs.append((name, [f"{job.run.name} {job.name}" for job in jobs], dependency))
        return (
            [f"{number}_{place}" for place in range(len(jobs))] if len(jobs) > 1 else [str(number)]
        )


def all_jobs(run_plans) -> list:
    return in_submission_order([job for plan in run_plans for job in jobs_of(plan)])


def sent(run_plans, ids: dict | None = None) -> list[tuple[str, list[str], str | None]]:
    send = Sent()
    submit(all_jobs(run_plans), Resources(), send, {} if ids is None else ids)
    return send.jobs


def finish(plan, *names: str) -> None:
    """Mark jobs as complete."""
    for job in jobs_of(plan):
        if job.name in names:
            job.directory.mkdir(parents=True, exist_ok=True)
            job.marker.write_text("{}")


def test_elements_of_a_chain_keep_their_index(tmp_path):
    """Also among runs with fewer stages, and gens: a stage is an array that follows the one
    before."""
    jobs = sent(plans(tmp_path, "sm --waiting-time 3", "gens", "ens --members 2", "sm"))
    places = {}
    for number, (_, elements, after) in enumerate(jobs, start=1):
        for place, name in enumerate(elements):
            places[name] = (f"{number}_{place}", after)
    arrays = [(elements, after) for name, elements, after in jobs if name.startswith("alma-stage")]
    of_ens = [[f"ens--members2 stage {k}, member {m} of 2" for m in (1, 2)] for k in range(3)]
    assert arrays == [
        ([*of_ens[0], "sm stage 0", "sm--waiting-time3 stage 0", "gens stage 0"], None),
        ([*of_ens[1], "sm stage 1"], "aftercorr:2"),
        (["gens stage 1"], None),
        (["gens stage 2"], None),
        ([*of_ens[2], "sm stage 2"], "aftercorr:3"),
    ]
    for name, (_, after) in places.items():
        if "evaluation of" in name and "ens" not in name:
            assert after == f"afterok:{places[name.replace('evaluation of ', '')][0]}"
    assert places["ens--members2 evaluation of stage 2"][1] == "afterok:6_0:6_1"
    assert places["gens evaluation of stage 2"][1] == "afterok:2_4:4:5"


def test_a_relaunch_submits_missing_jobs(tmp_path):
    run_plans = plans(tmp_path, "sm", "ens --members 2", "gens")
    finish(run_plans[0], "untrained", "stage 0", "evaluation of stage 0", "stage 1")
    finish(run_plans[2], *(job.name for job in jobs_of(run_plans[2])))  # complete
    finish(run_plans[1], "untrained", "stage 0, member 2 of 2")
    jobs = sent(run_plans)
    arrays = [(elements, after) for name, elements, after in jobs if name.startswith("alma-stage")]
    of_ens = [f"ens--members2 stage {index}, member" for index in range(3)]
    assert arrays == [
        ([f"{of_ens[0]} 1 of 2"], None),
        ([f"{of_ens[1]} 1 of 2"], "afterok:1"),
        ([f"{of_ens[1]} 2 of 2"], None),
        ([f"{of_ens[2]} 1 of 2"], "afterok:2"),
        ([f"{of_ens[2]} 2 of 2"], "afterok:3"),
        (["sm stage 2"], None),
    ]
    evaluations = {
        elements[0]: after for name, elements, after in jobs if name.startswith("alma-evaluate")
    }
    assert evaluations == {
        "sm evaluation of stage 1": None,
        "sm evaluation of stage 2": "afterok:6",
        "ens--members2 evaluation of stage 0": "afterok:1",
        "ens--members2 evaluation of stage 1": "afterok:2:3",
        "ens--members2 evaluation of stage 2": "afterok:4:5",
    }


def test_arrays_are_split_at_the_largest_that_slurm_takes(tmp_path, monkeypatch):
    """Elements of the parts follow those of the same index; a part of one job is no array."""
    monkeypatch.setattr(submission, "largest_array", lambda: 2)
    jobs = sent(plans(tmp_path, *(f"sm --seed {seed}" for seed in range(5)), megabatches=2))
    names = [[f"sm--seed{seed} stage {stage}" for seed in range(5)] for stage in range(2)]
    arrays = [(elements, after) for name, elements, after in jobs if name.startswith("alma-stage")]
    assert arrays == [
        (names[0][:2], None),
        (names[0][2:4], None),
        (names[0][4:], None),
        (names[1][4:], "afterok:6"),
        (names[1][:2], "aftercorr:4"),
        (names[1][2:4], "aftercorr:5"),
    ]
    assert max(len(elements) for _, elements, _ in jobs) == 2
    assert sum(len(elements) for _, elements, _ in jobs) == 25


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ("MaxArraySize            = 77\nSchedulerParameters     = x=1,max_array_tasks=33", 33),
        ("MaxArraySize            = 77\nSchedulerParameters     = (null)", 77),
        ("MaxArraySize            = 0", 1),
        ("", 1001),
    ],
)
def test_the_largest_array(slurm, config, size):
    assert squeue.largest_array() == 1001
    slurm.has(scontrol=config)
    assert squeue.largest_array() == size


def test_a_dry_run_counts_the_gpus_of_all_nodes(tmp_path):
    """Three trainings of 2 x 4 GPUs and four evaluations of one GPU, an hour each."""
    request = Resources(nodes=2, gpus_per_node=4, timeout_min=60)
    _, totals = submission.dry_run(all_jobs(plans(tmp_path, "sm")), request, tmp_path / "logs")
    assert "with 7 jobs, 28 GPU-hours requested" in totals


def test_a_refused_submission_says_how_many_are_queued(tmp_path, monkeypatch):
    (run_plan,) = plans(tmp_path, "ens --members 2")
    run_plan.out.mkdir()
    send = Sent()

    def full(name, *arguments):
        if len(send.jobs) == 2:
            raise submission.QueueIsFull(f"sbatch refused {name}: QOSMaxSubmitJobPerUserLimit")
        return send(name, *arguments)

    monkeypatch.setattr(submission, "to_slurm", lambda folder: full)
    refused = (
        "QOSMaxSubmitJobPerUserLimit; 3 jobs are submitted; rerun the command to submit the rest"
        ", or give --wait"
    )
    with pytest.raises(submission.QueueIsFull, match=refused):
        submission.launch(all_jobs([run_plan]), Resources(), tmp_path / "logs", [])
    busy = [job for job in queue.read_jobs(run_plan.out) if job.job_id]
    assert [job.name for job in busy] == [
        "untrained",
        *(f"stage 0, member {k} of 2" for k in (1, 2)),
    ]
    with pytest.raises(UserError, match="Limit; 0 jobs are submitted; rerun"):
        submission.launch(all_jobs([run_plan]), Resources(), tmp_path / "logs", busy)
    monkeypatch.setattr(submission, "to_slurm", lambda folder: Sent())
    submission.launch(all_jobs([run_plan]), Resources(), tmp_path / "logs", busy)
    assert all(job.job_id for job in queue.read_jobs(run_plan.out))


class Full(Sent):
    """A queue with room for so many jobs, and for `later` more after the first refusal."""

    def __init__(self, room: int, later: int = 0):
        super().__init__()
        self.room = room
        self.later = later

    def __call__(self, name, jobs, resources, dependency):
        if len(jobs) > self.room:
            self.room += self.later
            self.later = 0
            raise submission.QueueIsFull(f"sbatch refused {name}: AssocMaxSubmitJobLimit")
        self.room -= len(jobs)
        return super().__call__(name, jobs, resources, dependency)


@pytest.mark.parametrize(
    ("room", "later", "parts"),
    [
        (6, 0, [(slice(1), "afterok:1_0")]),
        (8, 0, [(slice(2), "aftercorr:1"), (slice(2, 3), "afterok:1_2")]),
        (
            7,
            3,
            [
                (slice(2), "aftercorr:1"),
                *[(slice(index, index + 1), f"afterok:1_{index}") for index in (2, 3, 4)],
            ],
        ),
    ],
)
def test_an_array_for_which_the_queue_has_no_room_is_parted(tmp_path, room, later, parts):
    """As many elements as fit; those after the first of a part wait for their own models."""
    run_plans = plans(tmp_path, *(f"sm --seed {seed}" for seed in range(5)), megabatches=2)
    for plan in run_plans:
        finish(plan, "untrained")
    send = Full(room, later)
    ids: dict[Path, str] = {}
    with pytest.raises(submission.QueueIsFull):
        submit(all_jobs(run_plans), Resources(), send, ids)
    first, second = [[f"sm--seed{seed} stage {stage}" for seed in range(5)] for stage in range(2)]
    parted = [(second[part], after) for part, after in parts]
    assert [job[1:] for job in send.jobs] == [(first, None), *parted]
    assert len(ids) == len(first) + sum(len(elements) for elements, _ in parted)
    for plan in run_plans:
        finish(plan, "stage 0")
    for plan in run_plans[:3]:
        finish(plan, "stage 1")
    send.room = 100
    del send.jobs[:]
    submit(all_jobs(run_plans), Resources(), send, {})
    trained = [job[1:] for job in send.jobs if job[0].startswith("alma-stage")]
    assert trained == [(second[3:], None)]


LIMIT = "sbatch refused x: QOSMaxSubmitJobPerUserLimit; 2 jobs are submitted; rerun"


@pytest.fixture
def tries(monkeypatch, tmp_path) -> SimpleNamespace:
    """`start` of a launch that SLURM refuses `refusals` times; `live` jobs of the user."""
    state = SimpleNamespace(count=0, refusals=2, live=1, waits=[], seen=[])

    def start() -> None:
        state.count += 1
        if state.count <= state.refusals:
            raise submission.QueueIsFull(LIMIT)

    def wait(runs):
        state.waits.append(runs)
        return state.seen

    jobs = {"1": squeue.JobState("RUNNING")}
    monkeypatch.setattr(submission, "ask", lambda: jobs if state.live else {})
    monkeypatch.setattr(queue, "live_jobs", lambda runs: ["job"] * state.live)
    monkeypatch.setattr(queue, "wait", wait)
    state.run = lambda wait=True: submission.submit_all(start, [tmp_path], wait)
    return state


def test_wait_submits_the_rest_when_the_queue_has_ended(tries, tmp_path, capsys):
    job = queue.SubmittedJob(name="stage 1", kind="train", marker=tmp_path / "trained.json")
    tries.seen = [queue.JobStatus(job, queue.NEVER)]  # what did not fit is no failure
    tries.run()
    assert (tries.count, tries.waits) == (3, [[tmp_path]] * 2)
    assert "submits the rest when jobs have ended" in capsys.readouterr().err


def test_a_job_that_fails_while_the_queue_is_full_is_not_submitted_again(tries, tmp_path):
    job = queue.SubmittedJob(name="stage 0", kind="train", marker=tmp_path / "trained.json")
    tries.seen = [queue.JobStatus(job, "failed")]
    with pytest.raises(children.StageFailed, match="stage 0 .* failed"):
        tries.run()
    assert tries.count == 1


def test_a_full_queue_without_wait_or_without_jobs_is_an_error(tries):
    with pytest.raises(submission.QueueIsFull):
        tries.run(wait=False)
    assert tries.count == 1
    tries.live = 0
    tries.run()  # the last job had just ended
    tries.count = 0
    tries.refusals = 9
    with pytest.raises(UserError, match="x: QOSMaxSubmitJobPerUserLimit; no job of yours is in"):
        tries.run()
    assert (tries.count, tries.waits) == (2, [])


@pytest.mark.parametrize(
    "reason",
    [
        "AssocMaxSubmitJobLimit",
        "QOSGrpSubmitJobsLimit",
        "allocation failure: Resource temporarily unavailable",
    ],
)
def test_a_limit_of_jobs_is_known_by_its_name(slurm, tmp_path, reason):
    """To the submission, and to the check before it, which leaves it to the submission."""
    (run_plan,) = plans(tmp_path, "sm")
    slurm.has(srun="", sinfo="state idle\n")
    slurm.fails(sbatch=f"sbatch: error: {reason}")
    send = submission.to_slurm(tmp_path / "logs")
    with pytest.raises(submission.QueueIsFull, match=reason):
        submit(all_jobs([run_plan]), Resources(), send, {})
    submission.check(Resources())
    slurm.fails(sbatch="sbatch: error: AssocMaxWallDurationPerJobLimit")
    with pytest.raises(UserError, match="would refuse the training"):
        submission.check(Resources())


def test_a_refusal_by_sbatch_is_one_line(slurm, tmp_path, capfd):
    (run_plan,) = plans(tmp_path, "sm")
    slurm.has(srun="")
    slurm.fails(sbatch="sbatch: error: Batch job submission failed: no")
    send = submission.to_slurm(tmp_path / "logs")
    with pytest.raises(UserError, match="^sbatch refused alma-untrained: .* failed: no; --dry-run"):
        submit(all_jobs([run_plan]), Resources(), send, {})
    assert capfd.readouterr() == ("", "")


def test_a_kill_between_two_submissions_loses_no_job(tmp_path, monkeypatch):
    (run_plan,) = plans(tmp_path, "sm")
    run_plan.out.mkdir()
    send = Sent()

    def killed(*arguments):
        if len(send.jobs) == 2:
            assert [job["job"] for job in read()] == [
                "1",
                "2",
            ]  # on disk before the third submission
            raise KeyboardInterrupt
        return send(*arguments)

    def read():
        return [
            job
            for job in json.loads((run_plan.out / "jobs.json").read_text())["jobs"]
            if job["job"]
        ]

    monkeypatch.setattr(submission, "to_slurm", lambda folder: killed)
    with pytest.raises(KeyboardInterrupt):
        submission.launch(all_jobs([run_plan]), Resources(), tmp_path / "logs", [])
    assert len(read()) == 2


def test_queued_jobs_stay_recorded_when_a_launch_requests_fewer_stages(tmp_path):
    (long,) = plans(tmp_path, "sm")
    short = dataclasses.replace(long, stages=long.stages[:1])
    long.out.mkdir()
    ids = {job.marker: str(number) for number, job in enumerate(jobs_of(long), start=11)}
    record(long.out, jobs_of(long), ids, tmp_path / "old")
    before = queue.read_jobs(long.out)
    unchanged = [job for job in before if job.name in ("stage 1", "evaluation of stage 1")]
    record(
        long.out,
        jobs_of(short),
        {job.marker: job.job_id for job in unchanged},
        tmp_path / "new",
        unchanged,
    )
    now = {job.name: job for job in queue.read_jobs(long.out)}
    assert list(now) == [
        "untrained",
        "stage 0",
        "evaluation of stage 0",
        "stage 1",
        "evaluation of stage 1",
    ]
    assert now["stage 1"].needs == (now["stage 0"].marker,)
    assert now["evaluation of stage 1"].needs == (now["stage 1"].marker,)
    assert (now["stage 0"].job_id, now["stage 1"].job_id) == (None, "14")
    assert now["stage 1"].log == tmp_path / "old/14_0_log.out"

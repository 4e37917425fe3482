"""What jobs ask of SLURM: the input of sbatch, and what a real SLURM makes of it."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from launcher import make

from alma.errors import UserError
from slurm.engine.resources import Resources
from slurm.engine.squeue import largest_array
from slurm.lm.placement import with_hosts


def script(resources: Resources, folder: Path, command: str = "true") -> str:
    return resources.script(command, folder, "name")


def asked(resources: Resources) -> dict[str, str]:
    """The options of sbatch."""
    return dict(
        re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script(resources, Path("logs")), re.MULTILINE)
    )


def test_only_what_was_asked_for_is_in_the_input_of_sbatch():
    plain = asked(Resources())
    assert plain["gpus-per-node"] == "8"
    assert not plain.keys() & {"wckey", "mem", "cpus-per-task", "gres", "partition"}
    by_gres = asked(Resources(sbatch=["gres=gpu:a100"], gpus_per_node=4))
    assert by_gres["gres"] == "gpu:a100:4"
    assert "gpus-per-node" not in by_gres
    assert asked(Resources(sbatch=["gres=scratch:9"], gpus_per_node=0))["gres"] == "scratch:9"
    words = ["qos=high", "--exclusive", "wckey=mine", "licenses=a:2,b=1", "signal=USR2@300"]
    options = {name: value.strip("'") for name, value in asked(Resources(sbatch=words)).items()}
    added = {
        "qos": "high",
        "exclusive": "",
        "wckey": "mine",
        "licenses": "a:2,b=1",
        "signal": "USR2@300",
    }
    assert options == plain | added
    assert plain["signal"] == "USR2@120"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"sbatch": ["gpus=4"]},
            "--sbatch gpus=4: alma sets it, by a flag such as --timeout-min or for each job",
        ),
        ({"sbatch": ["no-requeue"]}, "--sbatch no-requeue: alma sets it"),
        ({"sbatch": ["N=2"]}, "--sbatch N=2: give the long name"),
        ({"sbatch": ["x=a\nrm"]}, "give the long name"),
        ({"sbatch": ["mem-per-cpu=2G"]}, "--sbatch mem-per-cpu=2G: alma sets it"),
        ({"sbatch": ["signal=TERM@60"]}, "jobs save on USR2: give the seconds as signal=USR2@300"),
        ({"nodes": 0}, "--nodes 0: at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1: at least 0"),
        ({"timeout_min": 4}, "--timeout-min 4: at least 5"),
    ],
)
def test_contradictions_are_refused_in_one_line(arguments, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        Resources(**arguments)


def test_a_dry_run_says_what_each_job_asks_for_and_flags_change_it(tmp_path):
    """Large gMoE, 398M parameters in fp32, Adam: 8 x (4 + 1.6) + 2 x 4.8 GB; evaluated:
    4 + 2 x 1.6 GB.

    Its experiment has two workers that read data for each GPU.
    """
    launcher = make(tmp_path)
    experiment = str(Path("experiments/table2.yaml").resolve())
    words = ["--cluster", "slurm", "--dry-run", "--megabatches", "4", "--verbose", "runs=gmoe_w1"]

    def lines(*flags: str) -> list[str]:
        arguments = ("--size", "large", "--stream", "stream", *words, *flags, "--", "--fp16=false")
        out, _ = launcher.run_words(experiment, *arguments)
        answers = dict.fromkeys(
            re.findall(r"^#SBATCH (--(?:mem|cpus|gpus|gres)\S+)", out, re.MULTILINE)
        )
        return sorted(answers)

    lines_of_job = lines()
    options = ["--cpus-per-task=48", "--cpus-per-task=6", "--gpus-per-node=1", "--gpus-per-node=8"]
    assert lines_of_job == [*options, "--mem=55GB", "--mem=8GB"]
    lines_of_job = lines(
        "--nodes", "2", "--gpus-per-node", "4", "--mem-gb", "400", "--cpus-per-task", "0"
    )
    assert lines_of_job == ["--gpus-per-node=1", "--gpus-per-node=4", "--mem=100GB", "--mem=400GB"]


def test_an_evaluation_asks_for_its_share():
    request = Resources(cpus_per_task=8, sbatch=["exclusive", "gres=gpu"])
    whole = asked(request)
    share = asked(request.alone())
    assert (whole["gres"], share["gres"]) == ("gpu:8", "gpu:1")
    assert (whole["cpus-per-task"], share["cpus-per-task"]) == ("8", "1")
    for tasks in (1, 8):  # all cores of a node divided by its GPUs
        request = Resources(cpus_per_task=48 // tasks, tasks_per_node=tasks)
        assert (request.alone().tasks_per_node, request.alone().cpus_per_task) == (1, 6)


@pytest.mark.parametrize(
    ("node", "constraint", "cores", "gb"),
    [
        ("128 2000000 (null)", None, 16, 57),
        ("12 2000000 (null)", None, 12, 57),
        ("128 40960 (null)", None, 16, 40),
        ("128 1 (null)", None, 16, None),
        ("128 2000000 v100,ib\n12 20480 a100,ib", "a100", 12, 20),
        ("128 2000000 v100,ib\n12 20480 a100,ib", "ib", 16, 57),
        ("128 2000000 v100,ib\n12 20480 a100,ib", "[(a100&ib)*2|gone]", 12, 20),
        ("128 2000000 v100,ib\n12 20480 a100,ib", "a100&v100", 16, 57),  # sbatch refuses it
    ],
)
def test_no_more_than_a_node_has(slurm, node, constraint, cores, gb):
    """sinfo of several kinds of nodes; RealMemory 1: the cluster does not know its memory."""
    slurm.has(sinfo=f"4 1 (null)\n{node}\nno such thing")
    request = Resources(partition="learn", sbatch=constraint and [f"constraint={constraint}"])
    cost = Mock(settings={"--num-workers": 0}, processes=8)
    cost.host_memory.return_value = 57 * 10**9
    estimates = [Mock(costs=[cost], parameters=5 * 10**8)]
    sized = with_hosts(request, estimates)
    assert (sized.cpus_per_task, sized.mem_gb) == (cores, gb)
    assert slurm.calls("sinfo")[0][-2:] == ["--partition", "learn"]
    request_of_user = Resources(cpus_per_task=90, mem_gb=9000, sbatch=request.sbatch)
    assert with_hosts(request_of_user, estimates) == request_of_user
    slurm.fails(sinfo="no")
    assert with_hosts(request, estimates).mem_gb == 57


@pytest.mark.parametrize(("nodes", "gb"), [(1, 8), (2, 4), (3, 3)])
def test_a_node_gets_memory_for_its_own_processes(slurm, nodes, gb):
    cost = Mock(settings={"--num-workers": 0}, processes=8)
    cost.host_memory.side_effect = lambda processes: processes * 10**9
    sized = with_hosts(Resources(nodes=nodes), [Mock(costs=[cost], parameters=1)])
    assert sized.mem_gb == gb


def test_slurm_gives_every_process_its_gpus_and_cores(cluster, tmp_path):
    """By --gres, with another option.

    Since SLURM 22.05 srun takes over no --cpus-per-task; without a plugin that binds tasks to
    cores, as here, only its command line shows it.
    """
    request = Resources(
        gpus_per_node=2, cpus_per_task=6, mem_gb=3, sbatch=["nice=1", "gres=gpu:fake"]
    )
    tell = f"bash -c 'echo $SLURM_CPUS_PER_TASK $CUDA_VISIBLE_DEVICES > {tmp_path}/told'"
    (tmp_path / "script").write_text(script(request, tmp_path, tell))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script").strip()
    cluster.wait([job])
    assert cluster.state(job) == "COMPLETED"
    assert "--cpus-per-task=6 bash" in (tmp_path / "script").read_text()
    cores, gpus = (tmp_path / "told").read_text().split()
    assert (cores, gpus.count(",")) == ("6", 1)
    job_record = cluster.jobs()[job]
    assert (job_record["Nice"], job_record["MinMemoryNode"], job_record.get("WCKey", "")) == (
        "1",
        "3G",
        "",
    )


def test_slurm_takes_an_array_of_the_largest_size(cluster, monkeypatch):
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    most = largest_array()
    cluster.submit("true", "--test-only", f"--array=0-{most - 1}")
    with pytest.raises(RuntimeError, match="Invalid job array"):
        cluster.submit("true", "--test-only", f"--array=0-{most}")


def test_a_job_ends_when_one_of_its_processes_dies(cluster, tmp_path):
    request = Resources(nodes=2, gpus_per_node=1)
    die = "bash -c 'if [ $SLURM_PROCID = 1 ]; then exit 3; fi; sleep 600'"
    (tmp_path / "script").write_text(script(request, tmp_path, die))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script").strip()
    cluster.wait([job], timeout=60)
    assert cluster.state(job) == "FAILED"
    assert "task 1: Exited with exit code 3" in next(tmp_path.glob("*_0_log.out")).read_text()

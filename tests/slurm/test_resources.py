"""What jobs ask of SLURM: the input of sbatch, and what a real SLURM makes of it."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from launcher import make

from alma.errors import UserError
from slurm.engine.resources import Resources
from slurm.engine.submission import parameters
from slurm.lm.placement import with_hosts


def script(resources: Resources, folder: Path, command: str = "true") -> str:
    from submitit.slurm.slurm import _make_sbatch_string

    return _make_sbatch_string(command, folder, **parameters("name", resources, None))


def asked(resources: Resources) -> dict[str, str]:
    """The options of sbatch."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script(resources, Path("logs")), re.MULTILINE))


def test_only_what_was_asked_for_is_in_the_input_of_sbatch():
    plain = asked(Resources())
    assert plain["gpus-per-node"] == "8"
    assert not plain.keys() & {"wckey", "mem", "cpus-per-task", "gres", "partition"}
    by_gres = asked(Resources(gres="gpu:a100", gpus_per_node=4))
    assert by_gres["gres"] == "gpu:a100:4"
    assert "gpus-per-node" not in by_gres
    assert asked(Resources(gres="gpu", gpus_per_node=4).alone())["gres"] == "gpu:1"
    words = ["reservation=nlp", "--exclusive", "wckey=mine", "licenses=a:2,b=1"]
    more = asked(Resources(sbatch=words))
    added = {"reservation": "nlp", "exclusive": "", "wckey": "mine", "licenses": "a:2,b=1"}
    assert {name: more[name].strip("'") for name in more if name not in plain} == added
    assert {name: more[name] for name in plain} == plain


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"sbatch": ["gpus=4"]}, "--sbatch gpus=4: give --gpus-per-node instead"),
        ({"sbatch": ["time=10"]}, "--sbatch time=10: give --timeout-min instead"),
        ({"sbatch": ["ntasks=8"]}, "give --tasks-per-node instead"),
        ({"sbatch": ["no-requeue"]}, "--sbatch no-requeue: alma sets it for each job"),
        ({"sbatch": ["N=2"]}, "--sbatch N=2: give the long name"),
        ({"sbatch": ["x=a\nrm"]}, "give the long name"),
        ({"sbatch": ["mem-per-cpu=2G"], "mem_gb": 9}, "mem-per-cpu=2G: contradicts --mem-gb"),
        ({"gres": "gpu:8"}, "--gres gpu:8: give the name of the GPUs only"),
        ({"gres": "gpu", "gpus_per_node": 0}, "their number by --gpus-per-node"),
    ],
)
def test_contradictions_are_refused_in_one_line(given, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        Resources(**given)


def test_a_dry_run_says_what_each_job_asks_for_and_flags_change_it(tmp_path):
    """Large gMoE, 398M parameters in fp32, Adam: 8 x (4 + 1.6) + 2 x 4.8 GB; evaluated: 4 + 2 x 1.6 GB.

    Its experiment has two workers that read data for each GPU.
    """
    launcher = make(tmp_path)
    experiment = str(Path("experiments/table2.yaml").resolve())
    words = ["--cluster", "slurm", "--dry-run", "--megabatches", "4", "--verbose", "runs=gmoe_w1"]

    def lines(*more: str) -> tuple[str, list[str]]:
        given = ("--size", "large", "--stream", "stream", *words, *more, "--", "--fp16=false")
        out, err = launcher.run_words(experiment, *given)
        says = next(line for line in err.splitlines() if line.startswith("each training: "))
        found = dict.fromkeys(re.findall(r"^#SBATCH (--(?:mem|cpus|gpus|gres)\S+)", out, re.MULTILINE))
        return says, sorted(found)

    says, found = lines()
    gpus = "1 node with 8 GPUs, 48 cores, 55 GB; each evaluation: 1 node with 1 GPU, 6 cores, 8 GB"
    assert says == f"each training: {gpus}"
    each = ["--cpus-per-task=48", "--cpus-per-task=6", "--gpus-per-node=1", "--gpus-per-node=8"]
    assert found == [*each, "--mem=55GB", "--mem=8GB"]
    says, found = lines("--nodes", "2", "--gpus-per-node", "4", "--mem-gb", "400", "--cpus-per-task", "0")
    assert says.startswith(
        "each training: 2 nodes, each with 4 GPUs, 400 GB; each evaluation: 1 node with 1 GPU,"
    )
    assert found == ["--gpus-per-node=1", "--gpus-per-node=4", "--mem=100GB", "--mem=400GB"]
    _, found = lines(
        "--sbatch", "mem-per-gpu=40G", "--sbatch", "exclusive", "--gres", "gpu", "--cpus-per-task", "8"
    )
    assert found == [
        "--cpus-per-task=1",
        "--cpus-per-task=8",
        "--gres=gpu:1",
        "--gres=gpu:8",
        "--mem-per-gpu=40G",
    ]
    says, found = lines("--gpus-per-node", "0", "--tasks-per-node", "8")
    assert says.startswith("each training: 1 node with the defaults of the cluster; each")
    assert found == []


@pytest.mark.parametrize(
    ("node", "cores", "gb"),
    [("128 2000000", 16, 57), ("12 2000000", 12, 57), ("128 40960", 16, 40), ("128 1", 16, None)],
)
def test_no_more_than_a_node_has(slurm, node, cores, gb):
    """sinfo of two kinds of nodes; RealMemory 1: the cluster does not know its memory."""
    slurm.has(sinfo=f"4 1\n{node}\nno such thing")
    wanted = Resources(partition="learn")
    cost = Mock(settings={"--num-workers": 0}, processes=8)
    cost.host_memory.return_value = 57 * 10**9
    estimates = [Mock(costs=[cost], evaluation_host_memory=8 * 10**9)]
    sized = with_hosts(wanted, estimates)
    assert (sized.cpus_per_task, sized.mem_gb) == (cores, gb)
    assert slurm.calls("sinfo")[0][-2:] == ["--partition", "learn"]
    given = Resources(cpus_per_task=90, mem_gb=9000)
    assert with_hosts(given, estimates) == given
    slurm.fails(sinfo="no")
    assert with_hosts(wanted, estimates).mem_gb == 57


def test_slurm_gives_every_process_its_gpus_and_cores(cluster, tmp_path):
    """By --gres, with another option.

    Since SLURM 22.05 srun takes over no --cpus-per-task; without a plugin that binds tasks to cores, as here,
    only its command line shows it.
    """
    wanted = Resources(gres="gpu:fake", gpus_per_node=2, cpus_per_task=6, mem_gb=3, sbatch=["nice=1"])
    tell = f"bash -c 'echo $SLURM_CPUS_PER_TASK $CUDA_VISIBLE_DEVICES > {tmp_path}/told'"
    (tmp_path / "script").write_text(script(wanted, tmp_path, tell))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script").strip()
    cluster.wait([job])
    assert cluster.state(job) == "COMPLETED"
    assert "--cpus-per-task=6 bash" in (tmp_path / "script").read_text()
    cores, gpus = (tmp_path / "told").read_text().split()
    assert (cores, gpus.count(",")) == ("6", 1)
    found = cluster.jobs()[job]
    assert (found["Nice"], found["MinMemoryNode"], found.get("WCKey", "")) == (
        "1",
        "3G",
        "",
    )


def test_a_job_ends_when_one_of_its_processes_dies(cluster, tmp_path):
    wanted = Resources(nodes=2, gpus_per_node=1)
    die = "bash -c 'if [ $SLURM_PROCID = 1 ]; then exit 3; fi; sleep 600'"
    (tmp_path / "script").write_text(script(wanted, tmp_path, die))
    job = cluster.run("sbatch", "--parsable", tmp_path / "script").strip()
    cluster.wait([job], timeout=60)
    assert cluster.state(job) == "FAILED"
    assert "task 1: Exited with exit code 3" in next(tmp_path.glob("*_0_log.out")).read_text()

"""Commands of each stage, and what run.json records."""

import sys
from pathlib import Path

import pytest
from launcher import read_requests

from alma.errors import UserError
from slurm.lm.checks import reshard_command
from slurm.lm.plan import Plan, make_plan
from slurm.lm.request import read_flags


def plan(words: str = "", megabatches: int = 4) -> Plan:
    learner = "" if "--learner" in words else "--learner sm "
    (request,) = read_requests(f"S --out R {learner}{words}".split())
    return make_plan(request, megabatches)


def value(command: tuple[str, ...], flag: str) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def values(run_plan: Plan, flag: str) -> list[str | None]:
    return [value(spec.trainings[0].command, f"--{flag}") for spec in run_plan.stages]


def names(paths) -> list[str]:
    """Paths relative to the run directory."""
    return [str(path.relative_to("R")) for path in paths]


def test_commands_of_a_plain_chain_word_for_word():
    run_plan = plan("--seed 7 -- --max-update 400 --arch switch_gmoe_tiny --cpu --lr=1e-3")
    first, second, *_ = run_plan.stages
    assert list(second.trainings[0].command) == [
        sys.executable, "-m", "fairseq_cli.train", "S", "--task", "alma_lm",
        "--arch", "switch_gmoe_tiny", "--moe-expert-count", "4", "--stage", "1", "--seed", "7",
        "--save-dir", "R/stage_01", "--log-format", "json", "--log-interval", "20",
        "--max-update", "400", "--cpu", "--lr=1e-3",
    ]  # fmt: skip
    assert list(second.evaluate) == [
        sys.executable, "-m", "fairseq_alma.evaluate", "S", "--task", "alma_lm",
        "--gen-subset", "test", "--valid", "--stage", "1", "--waiting-time", "1",
        "--out", "R/stage_01/result.json", "--item-losses", "R", "--cpu",
        "--num-workers", "0", "--batch-size", "8",
        "--required-batch-size-multiple", "8", "--tokens-per-sample", "512",
        "--sample-break-mode", "none",
        "--megabatch-words", "0", "--megabatch-tokens", "0", "--megabatch-seed", "1",
    ]  # fmt: skip
    words = (
        "fairseq_alma.evaluate",
        "--untrained",
        "--seeds",
        "7",
        "--valid",
        "--out",
        "R/untrained.json",
    )
    assert run_plan.untrained[2:] == (*words, *first.trainings[0].arguments)
    assert [spec.trainings[0].previous for spec in (first, second)] == [None, Path("R/stage_00")]
    assert [second.models, second.directory] == [(Path("R/stage_01"),), Path("R/stage_01")]
    assert run_plan.request.updates == 400


@pytest.mark.parametrize(
    ("words", "trained_on"),
    [
        ("", [(1,), (2,), (3,), (4,), (5,)]),
        ("--replay", [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)]),
        ("--waiting-time 2 --replay", [(1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5)]),
        ("--replay-share .5", [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)]),
        ("--replay-share .5 --replay-from recent", [(1,), (1, 2), (2, 3), (3, 4), (4, 5)]),
    ],
)
def test_stages_follow_waiting_time_and_replay(words, trained_on):
    run_plan = plan(words, megabatches=5)
    assert [spec.stage.train_on for spec in run_plan.stages] == trained_on
    assert values(run_plan, "stage") == [str(k) for k in range(len(trained_on))]
    assert set(values(run_plan, "waiting-time")) == {"2" if "--waiting-time" in words else None}
    updates = {spec.trainings[0].updates for spec in run_plan.stages}
    assert updates == {run_plan.request.updates}  # replay changes no --max-update
    assert all(
        ("--replay" in spec.trainings[0].command) == ("--replay" in words.split())
        for spec in run_plan.stages
    )
    share = "0.5" if "share" in words else None
    source = "recent" if "recent" in words else None
    later = len(trained_on) - 1
    assert values(run_plan, "replay-share") == [None, *[share] * later]  # from the second stage on
    assert values(run_plan, "replay-from") == [None, *[source] * later]
    assert run_plan.config.get("replay_share") == (0.5 if share else None)


@pytest.mark.parametrize(
    ("words", "experts", "growth"),
    [
        ("", "4 6 8 10", "2 2 2"),
        ("--grow-experts 2,2,4", "4 6 8 12", "2 2 4"),
        ("--grow-experts 8 -- --moe-expert-count=8", "8 16 24 32", "8 8 8"),
    ],
)
def test_gmoe_grows_before_each_later_stage(words, experts, growth):
    run_plan = plan(f"--learner gmoe {words}")
    assert values(run_plan, "moe-expert-count") == experts.split()
    assert values(run_plan, "grow-experts") == [None, *growth.split()]
    assert values(run_plan, "grow-router") == [None, "preserve", "preserve", "preserve"]
    assert values(run_plan, "grow-optimizer") == [None, "reset", "reset", "reset"]
    assert all(
        spec.trainings[0].command.count("--moe-expert-count") == 1 for spec in run_plan.stages
    )
    assert [spec.settings["--moe-expert-count"] for spec in run_plan.stages] == list(
        map(int, experts.split())
    )
    copied = plan("--learner gmoe --grow-router copy --grow-optimizer copy")
    assert values(copied, "grow-router")[1:] == ["copy"] * 3
    assert (copied.config["grow_optimizer"], copied.config["grow_experts"]) == ("copy", [2, 2, 2])


def test_members_of_ens_have_own_seeds_and_continue_their_own_models():
    run_plan = plan("--learner ens --members 3 --seed 5")
    second = run_plan.stages[1]
    folders = ["stage_01/member_0", "stage_01/member_1", "stage_01/member_2"]
    assert (
        names(second.models)
        == names(training.directory for training in second.trainings)
        == folders
    )
    before = [name.replace("1/", "0/") for name in folders]
    assert names(training.previous for training in second.trainings) == before
    assert [value(training.command, "--seed") for training in second.trainings] == [
        "5",
        "1005",
        "2005",
    ]
    assert value(run_plan.untrained, "--seeds") == "5,1005,2005"
    assert run_plan.seeds == {"member_0": 5, "member_1": 1005, "member_2": 2005}
    assert run_plan.config["members"] == 3
    assert len(plan("--learner ens").stages[0].trainings) == 2


def test_gens_trains_one_new_member_per_stage_and_evaluates_all():
    run_plan = plan("--learner gens --seed 5")
    assert [names(spec.models) for spec in run_plan.stages[:2]] == [
        ["stage_00"],
        ["stage_00", "stage_01"],
    ]
    trainings = [training for spec in run_plan.stages for training in spec.trainings]
    assert names(training.directory for training in trainings) == [f"stage_0{k}" for k in range(4)]
    assert [training.previous for training in trainings] == [None] * 4
    assert values(run_plan, "seed") == ["5", "1005", "2005", "3005"]
    assert value(run_plan.untrained, "--seeds") == "5"


def test_gens_with_new_members_trains_each_apart_and_keeps_those_of_all_stages():
    run_plan = plan("--learner gens --new-members 2 --seed 5")
    folders = [f"stage_0{stage}/member_{member}" for stage in range(4) for member in range(2)]
    trainings = [training for spec in run_plan.stages for training in spec.trainings]
    assert names(training.directory for training in trainings) == folders
    assert names(run_plan.stages[-1].models) == folders
    assert [training.previous for training in trainings] == [None] * 8
    seeds = [value(training.command, "--seed") for training in trainings]
    assert seeds == [str(5 + 1000 * model) for model in range(8)]
    assert run_plan.config["new_members"] == 2
    assert "new_members" not in plan("--learner gens").config
    ours, theirs = (
        plan(f"--learner {words} --seed 5 -- --max-update 100").stages[0].trainings
        for words in ("gens --new-members 2", "ens --members 2")
    )
    assert [training.command for training in ours] == [training.command for training in theirs]


def test_umix_is_one_training_of_its_members():
    for words, members in (("", 2), ("--members 3", 3)):
        run_plan = plan(f"--learner umix {words}")
        assert values(run_plan, "members") == [str(members)] * 4
        assert [len(spec.trainings) for spec in run_plan.stages] == [1] * 4
        assert run_plan.stages[1].trainings[0].previous == Path("R/stage_00")
        assert run_plan.config["members"] == run_plan.stages[0].settings["--members"] == members


@pytest.mark.parametrize("learner", ["gens", "ens", "umix", "gmoe", "moe"])
def test_one_stage_of_any_learner_is_that_of_sm(learner):
    """The same command up to the folder: ens and umix of one member,
    and gens with one stage, equal sm."""
    members = "--members 1" if learner in ("ens", "umix") else ""
    words = "--waiting-time 4 --seed 3 -- --max-update 100"
    (ours,) = plan(f"--learner {learner} {members} {words}").stages
    (theirs,) = plan(words).stages
    command = [word for word in ours.trainings[0].command if word not in ("--members", "1")]
    assert [word.removesuffix("/member_0") for word in command] == list(theirs.trainings[0].command)
    assert len(ours.trainings) == len(ours.models) == 1


def test_from_scratch_every_stage_starts_a_new_model():
    for learner in ("sm", "ens", "umix", "gmoe"):
        run_plan = plan(f"--from-scratch --learner {learner}")
        assert all(
            training.previous is None for spec in run_plan.stages for training in spec.trainings
        )
        assert run_plan.config["from_scratch"] is True
    assert values(run_plan, "moe-expert-count") == ["4", "6", "8", "10"]
    assert values(run_plan, "grow-experts") == [None] * 4


def test_the_update_multiplier_lengthens_every_stage_and_its_schedule():
    flags = "--max-update 100 --total-num-update=100 --warmup-updates 7"
    run_plan = plan(f"--update-multiplier 3 -- {flags}")
    assert values(run_plan, "max-update") == values(run_plan, "total-num-update") == ["300"] * 4
    assert values(run_plan, "warmup-updates") == ["7"] * 4
    assert values(run_plan, "log-interval") == ["15"] * 4
    assert run_plan.request.updates == run_plan.stages[0].settings["--max-update"] == 300
    assert (run_plan.config["update_multiplier"], run_plan.config["fairseq_flags"]) == (
        3,
        flags.split(),
    )
    default = plan(
        "--update-multiplier 4"
    )  # without --total-num-update: the length of the training
    assert values(default, "max-update") == ["480000"] * 4
    assert values(default, "total-num-update") == [None] * 4


def test_one_schedule_counts_the_updates_of_all_stages():
    run_plan = plan("--learner gmoe --schedule continuous -- --max-update 100")
    assert values(run_plan, "schedule") == ["continuous"] * 4
    assert values(run_plan, "max-update") == ["100", "200", "300", "400"]
    assert (
        values(run_plan, "warmup-updates")
        == [str(run_plan.stages[0].settings["--warmup-updates"])] * 4
    )
    assert values(run_plan, "grow-optimizer") == [None, "copy", "copy", "copy"]
    assert [spec.trainings[0].earlier for spec in run_plan.stages] == [0, 100, 200, 300]
    assert {spec.settings["--max-update"] for spec in run_plan.stages} == {100}
    assert (run_plan.request.updates, run_plan.config["schedule"]) == (100, "continuous")
    twice = plan("--schedule continuous --update-multiplier 2 -- --max-update 100")
    assert values(twice, "max-update") == ["200", "400", "600", "800"]
    assert "schedule" not in plan().config


@pytest.mark.parametrize(
    ("average", "flag", "interval", "weights"),
    [
        (0.99, "ema-decay", "0.99", "average"),
        ("poly:8", "ema-poly", "8", "average"),
        ("last:4", "keep-interval-updates", "4", "last:4"),
    ],
)
def test_averages_are_kept_in_training_and_evaluated(average, flag, interval, weights):
    run_plan = plan(f"--average {average} -- --save-interval-updates 10 --max-update 40")
    assert values(run_plan, flag) == [interval] * 4
    assert all(
        ("--store-ema" in spec.trainings[0].command) == ("ema" in flag) for spec in run_plan.stages
    )
    assert {value(spec.evaluate, "--weights") for spec in run_plan.stages} == {weights}
    assert value(run_plan.untrained, "--weights") is None
    assert run_plan.config["average"] == average


def test_config_holds_all_that_changes_results_and_no_output_path():
    assert plan("--waiting-time 3 --stages 1").config == plan("--waiting-time 3").config
    assert [len(plan(f"--stages {n}").stages) for n in (1, 9)] == [1, 4]
    dense = plan("-- -a transformer_lm")
    assert values(dense, "arch") == ["transformer_lm"] * 4
    assert values(dense, "moe-expert-count") == [None] * 4
    run_plan = plan("--name base -- --lr 1e-3 --adam-betas (0.9,0.98)")
    assert run_plan.config == {
        "learner": "sm",
        "megabatches": 4,
        "waiting_time": 1,
        "replay": False,
        "seed": 0,
        "arch": "switch_gmoe",
        "moe_expert_count": 4,
        "fairseq_flags": ["--lr", "1e-3", "--adam-betas", "(0.9,0.98)"],
        "name": "base",
    }


def test_evaluation_inherits_the_flags_it_needs():
    run_plan = plan("--context-window 8")
    assert {
        value(words, "--context-window")
        for words in (run_plan.untrained, run_plan.stages[1].evaluate)
    } == {"8"}
    assert values(run_plan, "context-window") == [None] * 4
    aliased = plan("-- --max-sentences 4 --max-sentences=2").stages[0].evaluate
    assert value(aliased, "--batch-size") == "2"
    flags = "--max-tokens 4096 --lr 1 --tokens-per-sample 256 --fp16 --megabatch-words 9"
    evaluate = plan(f"-- {flags} --log-interval 7 --gpt2-encoder-json E").stages[0].evaluate
    inherited = ("--max-tokens", "--tokens-per-sample", "--megabatch-words", "--gpt2-encoder-json")
    assert [value(evaluate, name) for name in inherited] == ["4096", "256", "9", "E"]
    assert "--fp16" in evaluate
    assert "--lr" not in evaluate


def test_a_fairseq_preprocess_directory_is_cut_by_the_plug_in():
    def command(flags: str = "") -> list[str]:
        return reshard_command(
            *read_requests(["D", "--learner", "sm", "--out", "R", "--", *flags.split()])
        )

    assert command("--megabatch-tokens 9 --megabatch-seed=3 --cpu") == [
        *(sys.executable, "-m", "fairseq_alma.reshard", "D", "--megabatch-words", "0"),
        *("--megabatch-tokens", "9", "--megabatch-seed", "3"),
    ]
    assert command("--megabatch-words 9 --gpt2-encoder-json E")[-2:] == ["--gpt2-encoder-json", "E"]
    assert command("--gpt2-encoder-json E")[-2:] == ["--gpt2-encoder-json", "E"]
    with pytest.raises(UserError, match="--megabatch-words .*--gpt2-encoder-json FILE is enough"):
        command()


def test_flags_of_the_user_are_left_to_fairseq():
    """Repeated flags, negative numbers, and the log format."""
    assert read_flags(["--clip-norm", "-1", "--lr", "1", "--lr=2"]) == {
        "--clip-norm": ["--clip-norm", "-1"],
        "--lr": ["--lr", "1", "--lr=2"],
    }
    run_plan = plan("-- --max-update 9 --max-update=5 --log-format simple")
    assert run_plan.request.updates == 5
    assert (values(run_plan, "log-format"), values(run_plan, "log-interval")) == (
        ["simple"] * 4,
        ["1"] * 4,
    )
    assert run_plan.stages[0].trainings[0].command.count("--log-format") == 1


def test_init_is_the_model_of_stage_0_and_from_scratch_of_every_stage():
    """A training that continues another one takes only the architecture from it."""
    run_plan = plan("--init models/gpt2 --learner gmoe")
    assert values(run_plan, "init") == ["models/gpt2"] * 4
    assert values(run_plan, "init-sha256") == ["0f"] * 4
    assert values(run_plan, "grow-router") == [None, "tree", "tree", "tree"]
    assert value(run_plan.untrained, "--init") == "models/gpt2"
    assert (run_plan.config["init"], run_plan.config["init_sha256"]) == ("gpt2", "0f")
    assert "init" not in plan().config
    for words in ("--from-scratch", "--learner gens"):
        previous = [
            spec.trainings[0].previous for spec in plan(f"--init models/gpt2 {words}").stages
        ]
        assert previous == [None] * 4

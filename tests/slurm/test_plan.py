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


def values(made: Plan, flag: str) -> list[str | None]:
    return [value(spec.trainings[0].command, f"--{flag}") for spec in made.stages]


def names(paths) -> list[str]:
    """Paths relative to the run directory."""
    return [str(path.relative_to("R")) for path in paths]


def test_commands_of_a_plain_chain_word_for_word():
    made = plan("--seed 7 -- --max-update 400 --arch switch_gmoe_tiny --cpu --lr=1e-3")
    first, second, *_ = made.stages
    assert list(second.trainings[0].command) == [
        sys.executable, "-m", "fairseq_cli.train", "S", "--task", "alma_lm", "--arch", "switch_gmoe_tiny",
        "--moe-expert-count", "4", "--stage", "1", "--seed", "7",
        "--save-dir", "R/stage_01", "--log-format", "json", "--log-interval", "20",
        "--max-update", "400", "--cpu", "--lr=1e-3",
    ]  # fmt: skip
    assert list(second.evaluate) == [
        sys.executable, "-m", "fairseq_alma.evaluate", "S", "--task", "alma_lm", "--gen-subset", "test",
        "--valid", "--stage", "1", "--waiting-time", "1", "--out", "R/stage_01/result.json", "--cpu",
        "--num-workers", "0", "--batch-size", "8",
        "--required-batch-size-multiple", "8", "--tokens-per-sample", "512", "--sample-break-mode", "none",
        "--megabatch-words", "0", "--megabatch-tokens", "0", "--megabatch-seed", "1",
    ]  # fmt: skip
    ours = (
        "fairseq_alma.evaluate",
        "--untrained",
        "--seeds",
        "7",
        "--valid",
        "--out",
        "R/untrained.json",
    )
    assert made.untrained[2:] == (*ours, *first.trainings[0].arguments)
    assert [spec.trainings[0].previous for spec in (first, second)] == [None, Path("R/stage_00")]
    assert [second.models, second.directory] == [(Path("R/stage_01"),), Path("R/stage_01")]
    assert made.request.updates == 400


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
    made = plan(words, megabatches=5)
    assert [spec.stage.train_on for spec in made.stages] == trained_on
    assert values(made, "stage") == [str(k) for k in range(len(trained_on))]
    assert set(values(made, "waiting-time")) == {"2" if "--waiting-time" in words else None}
    updates = {spec.trainings[0].updates for spec in made.stages}
    assert updates == {made.request.updates}  # replay changes no --max-update
    assert all(
        ("--replay" in spec.trainings[0].command) == ("--replay" in words.split())
        for spec in made.stages
    )
    share, source = ("0.5" if "share" in words else None), ("recent" if "recent" in words else None)
    later = len(trained_on) - 1
    assert values(made, "replay-share") == [None, *[share] * later]  # from the second stage on
    assert values(made, "replay-from") == [None, *[source] * later]
    assert made.config.get("replay_share") == (0.5 if share else None)


@pytest.mark.parametrize(
    ("words", "experts", "growth"),
    [
        ("", "4 6 8 10", "2 2 2"),
        ("--grow-experts 2,2,4", "4 6 8 12", "2 2 4"),
        ("--grow-experts 8 -- --moe-expert-count=8", "8 16 24 32", "8 8 8"),
    ],
)
def test_gmoe_grows_before_each_later_stage(words, experts, growth):
    made = plan(f"--learner gmoe {words}")
    assert values(made, "moe-expert-count") == experts.split()
    assert values(made, "grow-experts") == [None, *growth.split()]
    assert values(made, "grow-router") == [None, "preserve", "preserve", "preserve"]
    assert values(made, "grow-optimizer") == [None, "reset", "reset", "reset"]
    assert all(spec.trainings[0].command.count("--moe-expert-count") == 1 for spec in made.stages)
    assert [spec.settings["--moe-expert-count"] for spec in made.stages] == list(
        map(int, experts.split())
    )
    copied = plan("--learner gmoe --grow-router copy --grow-optimizer copy")
    assert values(copied, "grow-router")[1:] == ["copy"] * 3
    assert (copied.config["grow_optimizer"], copied.config["grow_experts"]) == ("copy", [2, 2, 2])


def test_members_of_ens_have_own_seeds_and_continue_their_own_models():
    made = plan("--learner ens --members 3 --seed 5")
    second = made.stages[1]
    own = ["stage_01/member_0", "stage_01/member_1", "stage_01/member_2"]
    assert names(second.models) == names(training.directory for training in second.trainings) == own
    before = [name.replace("1/", "0/") for name in own]
    assert names(training.previous for training in second.trainings) == before
    assert [value(training.command, "--seed") for training in second.trainings] == [
        "5",
        "1005",
        "2005",
    ]
    assert value(made.untrained, "--seeds") == "5,1005,2005"
    assert made.seeds == {"member_0": 5, "member_1": 1005, "member_2": 2005}
    assert made.config["members"] == 3
    assert len(plan("--learner ens").stages[0].trainings) == 2


def test_gens_trains_one_new_member_per_stage_and_evaluates_all():
    made = plan("--learner gens --seed 5")
    assert [names(spec.models) for spec in made.stages[:2]] == [
        ["stage_00"],
        ["stage_00", "stage_01"],
    ]
    trainings = [training for spec in made.stages for training in spec.trainings]
    assert names(training.directory for training in trainings) == [f"stage_0{k}" for k in range(4)]
    assert [training.previous for training in trainings] == [None] * 4
    assert values(made, "seed") == ["5", "1005", "2005", "3005"]
    assert value(made.untrained, "--seeds") == "5"


def test_umix_is_one_training_of_its_members():
    for words, members in (("", 2), ("--members 3", 3)):
        made = plan(f"--learner umix {words}")
        assert values(made, "members") == [str(members)] * 4
        assert [len(spec.trainings) for spec in made.stages] == [1] * 4
        assert made.stages[1].trainings[0].previous == Path("R/stage_00")
        assert made.config["members"] == made.stages[0].settings["--members"] == members


@pytest.mark.parametrize("learner", ["gens", "ens", "umix", "gmoe", "moe"])
def test_one_stage_of_any_learner_is_that_of_sm(learner):
    """The same command up to the folder: ens and umix of one member, and gens with one stage, equal sm."""
    members = "--members 1" if learner in ("ens", "umix") else ""
    words = "--waiting-time 4 --seed 3 -- --max-update 100"
    (ours,) = plan(f"--learner {learner} {members} {words}").stages
    (theirs,) = plan(words).stages
    one = [word for word in ours.trainings[0].command if word not in ("--members", "1")]
    assert [word.removesuffix("/member_0") for word in one] == list(theirs.trainings[0].command)
    assert len(ours.trainings) == len(ours.models) == 1


def test_from_scratch_every_stage_starts_a_new_model():
    for learner in ("sm", "ens", "umix", "gmoe"):
        made = plan(f"--from-scratch --learner {learner}")
        assert all(training.previous is None for spec in made.stages for training in spec.trainings)
        assert made.config["from_scratch"] is True
    assert values(made, "moe-expert-count") == ["4", "6", "8", "10"]
    assert values(made, "grow-experts") == [None] * 4


def test_the_update_multiplier_lengthens_every_stage_and_its_schedule():
    flags = "--max-update 100 --total-num-update=100 --warmup-updates 7"
    made = plan(f"--update-multiplier 3 -- {flags}")
    assert values(made, "max-update") == values(made, "total-num-update") == ["300"] * 4
    assert values(made, "warmup-updates") == ["7"] * 4
    assert values(made, "log-interval") == ["15"] * 4
    assert made.request.updates == made.stages[0].settings["--max-update"] == 300
    assert (made.config["update_multiplier"], made.config["fairseq_flags"]) == (3, flags.split())
    default = plan(
        "--update-multiplier 4"
    )  # without --total-num-update: the length of the training
    assert values(default, "max-update") == ["480000"] * 4
    assert values(default, "total-num-update") == [None] * 4


def test_one_schedule_counts_the_updates_of_all_stages():
    made = plan("--learner gmoe --schedule continuous -- --max-update 100")
    assert values(made, "schedule") == ["continuous"] * 4
    assert values(made, "max-update") == ["100", "200", "300", "400"]
    assert values(made, "warmup-updates") == [str(made.stages[0].settings["--warmup-updates"])] * 4
    assert values(made, "grow-optimizer") == [None, "copy", "copy", "copy"]
    assert [spec.trainings[0].earlier for spec in made.stages] == [0, 100, 200, 300]
    assert {spec.settings["--max-update"] for spec in made.stages} == {100}
    assert (made.request.updates, made.config["schedule"]) == (100, "continuous")
    twice = plan("--schedule continuous --update-multiplier 2 -- --max-update 100")
    assert values(twice, "max-update") == ["200", "400", "600", "800"]
    assert "schedule" not in plan().config


@pytest.mark.parametrize(
    ("average", "flag", "kept", "weights"),
    [
        (0.99, "ema-decay", "0.99", "average"),
        ("poly:8", "ema-poly", "8", "average"),
        ("last:4", "keep-interval-updates", "4", "last:4"),
    ],
)
def test_averages_are_kept_in_training_and_evaluated(average, flag, kept, weights):
    made = plan(f"--average {average} -- --save-interval-updates 10 --max-update 40")
    assert values(made, flag) == [kept] * 4
    assert all(
        ("--store-ema" in spec.trainings[0].command) == ("ema" in flag) for spec in made.stages
    )
    assert {value(spec.evaluate, "--weights") for spec in made.stages} == {weights}
    assert value(made.untrained, "--weights") is None
    assert made.config["average"] == average


def test_config_holds_all_that_changes_results_and_no_output_path():
    assert plan("--waiting-time 3 --stages 1").config == plan("--waiting-time 3").config
    assert [len(plan(f"--stages {n}").stages) for n in (1, 9)] == [1, 4]
    dense = plan("-- -a transformer_lm")
    assert values(dense, "arch") == ["transformer_lm"] * 4
    assert values(dense, "moe-expert-count") == [None] * 4
    made = plan("--name base -- --lr 1e-3 --adam-betas (0.9,0.98)")
    assert made.config == {
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
    made = plan("--context-window 8")
    assert {
        value(words, "--context-window") for words in (made.untrained, made.stages[1].evaluate)
    } == {"8"}
    assert values(made, "context-window") == [None] * 4
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
    made = plan("-- --max-update 9 --max-update=5 --log-format simple")
    assert made.request.updates == 5
    assert (values(made, "log-format"), values(made, "log-interval")) == (["simple"] * 4, ["1"] * 4)
    assert made.stages[0].trainings[0].command.count("--log-format") == 1


def test_init_is_the_model_of_stage_0_and_from_scratch_of_every_stage():
    """A training that continues another one takes only the architecture from it."""
    made = plan("--init models/gpt2 --learner gmoe")
    assert values(made, "init") == ["models/gpt2"] * 4
    assert values(made, "init-sha256") == ["0f"] * 4
    assert values(made, "grow-router") == [None, "tree", "tree", "tree"]
    assert value(made.untrained, "--init") == "models/gpt2"
    assert (made.config["init"], made.config["init_sha256"]) == ("gpt2", "0f")
    assert "init" not in plan().config
    for words in ("--from-scratch", "--learner gens"):
        previous = [
            spec.trainings[0].previous for spec in plan(f"--init models/gpt2 {words}").stages
        ]
        assert previous == [None] * 4

"""Settings of the launcher that are refused, in one line."""

import pytest
from launcher import read_requests

from alma.errors import UserError
from alma.learners import text_learners
from alma.options import changed
from slurm.lm.checks import check
from slurm.lm.plan import make_plan

GMOE = ["--learner", "gmoe"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--save-dir", "x"], "--out"),
        (["--", "--waiting-time=2"], "give --waiting-time before"),
        (["--", "--task", "language_modeling"], "always alma_lm"),
        (["--", "stray"], "flags of fairseq-train"),
        (["--", "--max-update", "many"], "--max-update: invalid int value: 'many'"),
        (["--", "--moe-expert-count", "4", "--arch", "transformer_lm"], "unrecognized argument"),
        (["--waiting-time", "5"], "longer than the stream"),
        (["--grow-experts", "2"], "--grow-experts needs --learner gmoe, not sm: leave it out"),
        (["--members", "2"], "--members needs --learner ens or umix, not sm"),
        (["--learner", "ens", "--members", "0"], "--members 0: at least 1"),
        (["--new-members", "2"], "--new-members needs --learner gens, not sm: leave it out"),
        (["--learner", "gens", "--new-members", "0"], "--new-members 0: at least 1"),
        (["--learner", "gens", "--from-scratch"], "gens trains new models in every stage"),
        (
            ["--learner", "umix", "--", "--arch", "transformer_lm"],
            "transformer_lm: umix needs experts",
        ),
        (["--update-multiplier", "2", "--", "--max-update", "0"], "multiplies --max-update"),
        (["--schedule", "continuous", "--learner", "gens"], "continuous: gens trains new models"),
        (
            ["--schedule", "continuous", "--from-scratch"],
            "continuous: --from-scratch trains new models",
        ),
        (
            [*GMOE, "--schedule", "continuous", "--grow-optimizer", "reset"],
            "continuous keeps the optimizer",
        ),
        *(
            (
                ["--schedule", "continuous", "--", *words],
                f"{words[0]}: --schedule continuous sets the rate",
            )
            for words in (["--lr-scheduler", "polynomial_decay"], ["--total-num-update", "600"])
        ),
        (["--", "--finetune-from-model", "x"], "stage 0 starts a new model, each later stage"),
        (["--", "--tokens-per-sample", "0"], "--tokens-per-sample 0: at least 1"),
        (["--", "--update-freq", "0"], "--update-freq 0: at least 1"),
        (["--seed", "5000000000"], "--seed 5000000000: below 2,147,483,648"),
        (["--out", "runs/a:b"], "--out runs/a:b: fairseq splits paths at colons"),
        (["--out", ".", "--seeds", "0-1"], "--out .: give the folder of a run"),
        (["--seeds", "0-99999999999"], "more than 100,000 numbers"),
        (["--seed", "0", "--seeds", "0-2"], "--seed 0 beside --seeds: give one of them"),
        (["--replay-share", "1"], "--replay-share 1.0: a share"),
        (["--replay-share", ".5", "--replay"], "leave out --replay or --replay-share"),
        (["--replay-from", "recent"], "--replay-from recent needs --replay-share"),
        (
            ["--average", "1"],
            "1 is no average: give a decay below 1 such as .95, or poly:ETA such as poly:8",
        ),
        (["--average", ".9", "--", "--ema-decay", ".5"], "--ema-decay: --average 0.9 sets it"),
        (["--average", "last:3", "--", "--keep-interval-updates", "2"], "--average last:3 sets it"),
        (
            ["--average", "last:3", "--", "--max-update", "90"],
            "give --save-interval-updates 30 or less",
        ),
        (["--average", "last:3", "--", "--save-interval-updates", "0"], "-updates 40000 or less"),
        (["--stages", "0"], "--stages 0: at least 1"),
        (["--size", "small"], "--size and --stream are for experiments"),
        ([*GMOE, "--grow-experts", "2,2"], "2 growths given, but 4 stages grow 3 times"),
        ([*GMOE, "--grow-experts", "2,7,1"], "growth 2 adds 7 to 6"),
        ([*GMOE, "--grow-experts", "two"], "--grow-experts: 'two': a whole number"),
        (["--nonsense"], "if --nonsense is a flag of fairseq-train: put it after"),
        (["--arch", "switch_gmoe"], "--arch is a flag of fairseq-train: put it after `--`"),
        (["--waiting-tim", "4"], "did you mean --waiting-time.\\)"),
        (["--learner", "gmo"], "invalid choice: 'gmo' .did you mean gmoe"),
    ],
)
def test_refused(words, message):
    learner = [] if "--learner" in words else ["--learner", "sm"]
    with pytest.raises(UserError, match=message) as refused:  # noqa: PT012 - each step refuses some
        out = [] if "--out" in words else ["--out", "R"]
        (request,) = read_requests(["S", *out, *learner, *words])
        check(request)
        make_plan(request, 4)
    assert "\n" not in str(refused.value)


def test_a_name_without_a_folder_may_be_meant_as_an_experiment(tmp_path):
    with pytest.raises(
        UserError, match="experiments/table2: no such stream; .*experiments/table2.yaml$"
    ):
        read_requests(["experiments/table2"])
    with pytest.raises(UserError, match="give --learner"):
        read_requests([str(tmp_path)])


@pytest.mark.parametrize("learner", text_learners())
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--replay"],
        ["--from-scratch"],
        ["--replay-share", "0"],
        ["--schedule", "stage"],
        ["--schedule", "continuous", "--average", "0"],
    ],
)
def test_the_anytime_preset_leaves_chosen_options_and_contradicts_none(learner, words):
    (plain,) = _requests_of(["--learner", learner, *words])
    if learner == "gens" and {"--from-scratch", "continuous"} & set(words):
        return  # refused with and without the preset
    (request,) = _requests_of(["--learner", learner, *words, "--preset", "anytime"])
    check(request)
    goes_on = "from_scratch" not in changed(plain) and learner != "gens"
    assert request.replay_share == (0 if words[:1] in (["--replay"], ["--replay-share"]) else 0.5)
    assert request.schedule == (
        plain.schedule if "--schedule" in words or not goes_on else "continuous"
    )
    assert request.average == ("poly:8" if goes_on and "--schedule" not in words else 0)


def _requests_of(words):
    return read_requests(["S", "--out", "R", *words, "--", "--arch", "switch_gmoe"])

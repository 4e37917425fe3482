"""A killed training, started again with the same command, equals an uninterrupted one,
with every flag."""

import argparse
import importlib.util
import itertools
import re
import signal

import pytest
import yaml
from fairseq import options
from fairseq.registry import REGISTRIES

from alma.errors import command
from fairseq_alma import defaults
from fairseq_alma.check import check_run
from tests.fairseq_alma.conftest import TINY
from tests.fairseq_alma.shared import assert_same_model, assert_same_training

TABLE = yaml.safe_load(defaults.FLAGS.read_text())
LISTED = ("resumed", "rebuilt", "several processes", "unused")
BASE = "--max-tokens 1024 --update-freq 2 --save-interval-updates 4 --keep-interval-updates 1"
"""8 updates an epoch; the folder keeps what later flags say."""
FLAGS = {
    "fp16": "--fp16 --fp16-init-scale 4 --fp16-scale-window 3 --fp16-scale-tolerance .25 "
    "--min-loss-scale 1e-3 --threshold-loss-scale 2",
    "lean_fp16": "--memory-efficient-fp16 --fp16-scale-window 9",
    "bf16": "--bf16",
    "lean_bf16": "--memory-efficient-bf16",
    "adam": "--optimizer adam --use-old-adam --adam-betas (0.8,0.9) --adam-eps 1e-6 "
    "--weight-decay .01",
    "adamax": "--optimizer adamax --adamax-betas (0.8,0.9) --adamax-eps 1e-6 --no-bias-correction",
    "nag": "--optimizer nag --momentum .5",
    "sgd": "--optimizer sgd --momentum .5",
    "adagrad": "--optimizer adagrad",
    "adadelta": "--optimizer adadelta --adadelta-rho .8 --adadelta-eps 1e-5",
    "adafactor": "--optimizer adafactor --adafactor-eps (1e-20,1e-2) --clip-threshold 2 "
    "--decay-rate -.5 --beta1 .5 --scale-parameter",
    "polynomial": "--end-learning-rate 1e-4 --power 2",
    "fixed": "--lr-scheduler fixed --lr 1e-3,2e-3 --warmup-updates 3",
    "inverse_sqrt": "--lr-scheduler inverse_sqrt --warmup-init-lr 1e-4",
    "cosine": "--lr-scheduler cosine --min-lr 1e-5 --lr-period-updates 5 --t-mult 2 --lr-shrink .5",
    "step": "--lr-scheduler step --lr-decay .5 --lr-deacy-period 5",
    "tri_stage": "--lr-scheduler tri_stage --warmup-steps 4 --hold-steps 4 --decay-steps 9 "
    "--init-lr-scale .1 --final-lr-scale .1",
    "thirds": "--lr-scheduler tri_stage --phase-ratio (0.3,0.3,0.4)",
    "triangular": "--lr-scheduler triangular --max-lr .01 --lr-period-updates 6 --shrink-min "
    "--lr-shrink .5",
    "manual": "--lr-scheduler manual --epoch2lr {'1':1e-3,'2':2e-3} "
    "--update2lr {'6':1e-3,'11':3e-3}",
    "data": "--batch-size 16 --required-batch-size-multiple 5 --batch-size-valid 3 "
    "--max-tokens-valid 512 --seed 3 --num-workers 1 --skip-remainder-batch --sentence-avg "
    "--clip-norm .1 --dropout .2",
    "layers": "--arch transformer_lm --decoder-ffn-embed-dim 32 --decoder-layerdrop .3",
    "order": "--curriculum 1 --update-ordered-indices-seed --grouped-shuffling",
    "groups": "--grouped-shuffling --update-epoch-batch-itr True",
    "end": "--max-update 99 --max-epoch 3",
    "epochs alone": "--lr-scheduler polynomial_decay --max-update 0 --max-epoch 3",
    "validation": "--valid-subset test,valid --validate-interval 2 --validate-interval-updates 3 "
    "--validate-after-updates 5 --fixed-validation-seed 4 --max-valid-steps 2",
    "none": "--disable-validation",
    "folder": "--save-interval 2 --keep-interval-updates 2 --keep-interval-updates-pattern 8 "
    "--keep-last-epochs 1 --keep-best-checkpoints 2 --best-checkpoint-metric ppl "
    "--maximize-best-checkpoint-metric",
    "epochs": "--no-epoch-checkpoints --save-interval 1",
    "anew": "--no-last-checkpoints",
    "average": "--store-ema --ema-decay .5 --ema-start-update 3 --ema-update-freq 2 --ema-fp32",
    "polynomial_average": "--store-ema --ema-poly 4",
    "patience": "--patience 6 --validate-interval-updates 3 --maximize-best-checkpoint-metric",
    "restored": "--restore-file STAGE --reset-optimizer --reset-dataloader",
    "once": "--continue-once STAGE --reset-dataloader --reset-meters --reset-lr-scheduler "
    "--reset-optimizer",
    "finetuned": "--finetune-from-model STAGE --stage 1 --replay-share .5 --replay-from recent",
    "continuous": "--finetune-from-model STAGE --stage 1 --schedule continuous "
    "--lr-scheduler fixed --max-update 40",
}
"""Flags of a training, with others than their defaults; STAGE is the checkpoint of a training."""
HOLDERS = {
    "--relative-step": ("--optimizer", "adafactor"),
    "--warmup-init": ("--optimizer", "adafactor"),
    "--anneal-eps": ("--optimizer", "adadelta"),
    "--decoder-attention": ("--arch", "lstm_lm"),
}
"""Choices that have a flag which others lack."""
FAST = ("patience", "epochs alone")

DIES = """
import os, signal
from fairseq_alma.task import AlmaLMTask

step = AlmaLMTask.train_step

def train_step(self, sample, model, criterion, optimizer, update_num, **kwargs):
    if update_num == int(os.environ["DIES_AT"]):
        os.kill(os.getpid(), int(os.environ.get("DIES_BY", signal.SIGKILL)))
    return step(self, sample, model, criterion, optimizer, update_num, **kwargs)

AlmaLMTask.train_step = train_step
"""


def names(text: str) -> set[str]:
    return {word for word in text.split() if word.startswith("--")}


def with_value(action: argparse.Action) -> tuple[str, ...]:
    """The flag of an action, with a value that is not its default."""
    if action.nargs == 0:
        return (action.option_strings[0],)
    choices = [choice for choice in action.choices or () if choice != action.default]
    value = ".7" if action.type is float else "7"
    return (action.option_strings[0], choices[0] if choices else value)


def actions_of(*words: str, data: str = "STREAM") -> dict[str, argparse.Action]:
    """All flags of fairseq-train, by their first names, that these choices have."""
    parser = options.get_training_parser(default_task="alma_lm")
    options.parse_args_and_arch(parser, [data, *words])
    return {action.option_strings[0]: action for action in parser._actions if action.option_strings}


def test_the_table_has_every_flag_of_fairseqs_parser_once():
    lists = {name: TABLE[name].split() for name in LISTED}
    listed = [*itertools.chain(*lists.values()), *TABLE["refused"], *TABLE["refused of models"]]
    assert len(listed) == len(set(listed))
    choices = [
        ("--arch", arch) for arch in ("transformer_lm", "lstm_lm", "fconv_lm", "lightconv_lm")
    ]
    for flag in ("--optimizer", "--lr-scheduler", "--criterion"):
        choices += [(flag, choice) for choice in TABLE["choices"][flag]]
    extra_flags = {"triangular": ("--max-lr", "1")}
    known_flags = set(actions_of()).union(
        *(actions_of(*pair, *extra_flags.get(pair[1], ())) for pair in choices)
    )
    assert set(listed) == known_flags - {"-h"}
    accepted = set(itertools.chain(*lists.values()))
    for name in ("refused in runs", "needs", "packages", "choices"):
        assert TABLE[name].keys() <= accepted, name
    assert names(" ".join((*FLAGS.values(), BASE, TINY))) >= set(lists["resumed"])


@pytest.mark.parametrize("kind", ["optimizer", "lr_scheduler", "criterion"])
def test_no_other_choice_of_fairseq_is_accepted(kind, capsys):
    flag = f"--{kind.replace('_', '-')}"
    registered = REGISTRIES[kind]["registry"].items()
    names_of_fairseq = {
        name for name, class_ in registered if class_.__module__.startswith("fairseq.")
    }
    names_of_fairseq -= set(TABLE["choices"][flag])
    assert names_of_fairseq
    needed = {"composite_loss": ("--underlying-criterion", "cross_entropy")}
    for choice in names_of_fairseq:
        with pytest.raises(SystemExit, match="2"):
            actions_of(flag, choice, *needed.get(choice, ()))
        assert capsys.readouterr().err.startswith(
            f"error: {flag} {choice}: the task alma_lm takes "
        )


def test_what_the_table_refuses_is_refused_with_its_remedy(capsys):
    def error(call, *words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            command(lambda: call(*words))()
        return capsys.readouterr().err

    for flag, remedy in (TABLE["refused"] | TABLE["refused of models"]).items():
        needed = HOLDERS.get(flag, ())
        action = actions_of(*needed)[flag]
        words = (*needed, *with_value(action))
        assert error(actions_of, *words) == f"error: {flag}: {remedy}\n"
        if action.nargs != 0 and action.default not in (None, argparse.SUPPRESS):
            actions_of(*needed, flag, str(action.default))
    for flag, remedy in TABLE["refused in runs"].items():
        assert error(check_run, ["STREAM", flag]) == f"error: {flag}: {remedy}\n"
    words = ("--reset-meters", "--finetune-from-model", "x.pt")
    expected = (
        "error: --reset-meters: --finetune-from-model resets all but the weights; leave it out\n"
    )
    assert error(actions_of, *words) == expected


def test_what_does_nothing_alone_is_refused(capsys):
    def error(*words: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            actions_of(*words)
        return capsys.readouterr().err

    actions = actions_of()
    for flag, needed in TABLE["needs"].items():
        words = with_value(actions[flag])
        expected = (
            f"error: {flag} does nothing without {' or '.join(needed)}: give both, "
            "or leave it out\n"
        )
        assert error(*words) == expected
        if "--init" not in needed and flag != "--aim-run-hash":
            actions_of(*words, *with_value(actions[needed[-1]]))
    for flag, package in TABLE["packages"].items():
        if importlib.util.find_spec(package) is None:
            expected = f"error: {flag}: `pip install {package}`, or leave it out\n"
            assert error(*with_value(actions[flag])) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--restore-file typo.pt",
            "--restore-file typo.pt: no such file; give the path of a file, or ",
        ),
        (
            "--restore-file x.pt --save-dir SAVED",
            r"--restore-file x.pt: no such file; give \S+/x.pt$",
        ),
        ("--continue-once typo.pt", "--continue-once typo.pt: no such file"),
        ("--arch lstm_lm --decoder-embed-path typo", "--decoder-embed-path typo: no such file"),
        ("--gpt2-encoder-json typo", "--gpt2-encoder-json typo: no such file"),
        ("--log-file missing/log", "--log-file missing/log: no directory missing; make it first"),
        ("--user-dir typo", "--user-dir /.*/typo: no such directory; give the path of your code"),
        ("--decoder-output-dim 16", "--decoder-input-dim and --decoder-output-dim differ, but "),
        (
            "--best-checkpoint-metric bleu",
            "--best-checkpoint-metric bleu: validation computes loss, ppl: ",
        ),
    ],
)
def test_missing_files_are_refused(words, message, tmp_path, capsys):
    (tmp_path / "x.pt").touch()
    with pytest.raises(SystemExit, match="2"):
        actions_of(*words.replace("SAVED", str(tmp_path)).split())
    assert re.match(f"error: {message}", capsys.readouterr().err)


def test_a_file_that_is_read_is_accepted(tmp_path):
    last = tmp_path / "checkpoint_last.pt"
    actions_of("--restore-file", "checkpoint_last.pt")  # the default, of a new training
    last.touch()
    actions_of("--restore-file", str(last))
    actions_of("--continue-once", "deleted.pt", "--save-dir", str(tmp_path))  # it was read once


def test_no_directory_is_made_for_a_missing_checkpoint(start, stream, tiny, tmp_path):
    words = (stream, *tiny, "--save-dir", tmp_path / "made", "--restore-file", "typo.pt")
    assert start("train", *words).wait().error.startswith("--restore-file typo.pt: no such file")
    assert not (tmp_path / "made").exists()
    words = (stream, *tiny, "--save-dir", tmp_path / "made", "--user-dir", "typo")
    assert "typo: no such directory" in start("train", *words).wait().error


def test_flags_that_cut_data_are_refused_with_a_stream(stream, capsys):
    for flag in (
        "--megabatch-words",
        "--megabatch-tokens",
        "--megabatch-seed",
        "--gpt2-encoder-json",
    ):
        with pytest.raises(SystemExit, match="2"):
            actions_of(flag, "7", data=str(stream))
        assert re.match(f"error: {flag}: leave it out: .* is a stream", capsys.readouterr().err)


def test_unused_flags_change_no_number(train, tmp_path):
    """But for --aim-repo, --wandb-project and --azureml-logging, packages that are not installed,
    --profile, which needs a GPU, and --expect-*, which refuse."""
    values = {
        "--log-interval": "3",
        "--log-format": "simple",
        "--log-file": str(tmp_path / "log"),
        "--tensorboard-logdir": str(tmp_path / "board"),
        "--empty-cache-freq": "3",
        "--tokenizer": "moses",
        "--bpe": "gpt2",
        "--dataset-impl": "mmap",
        "--data-buffer-size": "3",
        # of `fairseq_alma.evaluate --untrained`, which takes a training's flags
        "--gen-subset": "valid",
    }
    alone = "--no-progress-bar --debug-param-names --ignore-unused-valid-subsets".split()
    untried = names(
        "--aim-repo --aim-run-hash --wandb-project --azureml-logging --profile --save-dir"
    )
    untried |= names("--no-save --expect-tokens --expect-gpus")
    assert values.keys() | set(alone) | untried == names(TABLE["unused"])
    words = [*itertools.chain(*values.items()), *alone]
    train(tmp_path / "without", "--max-update", "4")
    train(tmp_path / "with", "--max-update", "4", *words)
    last = [tmp_path / folder / "checkpoint_last.pt" for folder in ("without", "with")]
    assert_same_training(*last)


def test_flags_of_several_processes_change_no_number(train_on_two, tmp_path):
    """But for --ddp-backend and --ddp-comm-hook fp16, which change how gradients are added up,
    and those of the start of the processes, which the environment determines here."""
    words = (
        "--bucket-cap-mb 1 --find-unused-parameters --gradient-as-bucket-view --broadcast-buffers "
        "--fix-batches-to-gpus --fast-stat-sync --heartbeat-timeout 99 "
        "--all-gather-list-size 20000 --load-checkpoint-on-all-dp-ranks --zero-sharding os"
    )
    untried = names(
        "--ddp-backend --ddp-comm-hook --device-id --distributed-num-procs --distributed-rank"
    )
    untried |= names("--distributed-backend --distributed-init-method --distributed-port")
    untried |= names("--distributed-no-spawn")
    assert names(words) | untried == names(TABLE["several processes"])
    train_on_two(tmp_path / "without", "--max-update", "3")
    train_on_two(tmp_path / "with", "--max-update", "3", *words.split())
    assert_same_training(
        *(tmp_path / folder / "checkpoint_last.pt" for folder in ("without", "with"))
    )


@pytest.mark.parametrize(
    "flags",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in FLAGS],
)
def test_a_killed_training_equals_an_uninterrupted_one(
    start, stream, tiny, user_dir, stage0, tmp_path, flags
):
    text = FLAGS[flags].replace("STAGE", str(stage0))
    if "--lr-scheduler" in text:  # not all have these flags of `tiny`
        tiny = re.sub(
            "--(lr-scheduler|total-num-update|warmup-updates) [^ ]+", "", " ".join(tiny)
        ).split()
    words = (stream, *tiny, *BASE.split(), *text.split(), "--save-dir")

    def train(folder: str, *flags, dies: str = "") -> int:
        return (
            start("train", *words, tmp_path / folder, *flags, environment={"DIES_AT": dies})
            .wait()
            .code
        )

    assert train("whole") == 0
    dying = user_dir(DIES)
    for update in (14, 19):
        code = train("killed", *dying, dies=str(update + (20 if flags == "continuous" else 0)))
        assert code == (0 if (flags, update) == ("patience", 19) else -signal.SIGKILL)
    assert train("killed") == 0
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.pt"))
    assert files == sorted(path.name for path in (tmp_path / "killed").glob("*.pt"))
    last = "checkpoint_last.pt" if "checkpoint_last.pt" in files else files[-1]
    assert_same_training(tmp_path / "whole" / last, tmp_path / "killed" / last)
    for name in files:
        assert_same_model(tmp_path / "whole" / name, tmp_path / "killed" / name)

"""Command lines of `--task alma_lm`: defaults and errors;
our own commands parse before torch loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fairseq import options

from alma.errors import command
from fairseq_alma import check, defaults
from tests import composed
from tests.fairseq_alma.shared import config_of

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("check", "evaluate", "reshard")


def settings(*words: str) -> dict:
    """All settings of the command line `STREAM words`."""
    return check.resolve(["STREAM", *words])["settings"]


def refused(capsys, *words: str) -> str:
    """The one-line error of a command line."""
    with pytest.raises(SystemExit, match="2"):
        command(lambda: check.resolve(list(words)))()
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    "words",
    [
        "--arch switch_gmoe_tiny --optimizer adam --adam-betas (0.5,0.9) --lr 1e-2,1e-3 "
        "--save-dir a=b,c",
        "--arch transformer_lm --criterion chunked_cross_entropy --optimizer adafactor --fp16 "
        "--seed 2",
    ],
)
def test_configurations_of_forked_children_are_those_that_hydra_composes(words, monkeypatch):
    monkeypatch.setattr("fairseq.dataclass.utils.compose", composed.hydras)
    expected = config_of("STREAM", *words.split())
    monkeypatch.setattr("fairseq.dataclass.utils.compose", composed.compose)
    for _ in range(2):  # composed, remembered
        assert config_of("STREAM", *words.split()) == expected


def test_the_literal_command_trains_as_the_paper_does():
    alma_settings = settings("--task", "alma_lm")
    base = yaml.safe_load((ROOT / "experiments/table2.yaml").read_text())["sizes"]["base"]["flags"]
    # These are the file's own: number of GPUs, precision, data loading.
    for flag in base.keys() - {
        "arch",
        "distributed-world-size",
        "fp16",
        "num-workers",
        "warmup-updates",
    }:
        value = base[flag]
        if flag in ("lr", "update-freq"):
            value = [float(value)]
        elif flag == "adam-eps":
            value = float(value)
        assert alma_settings[f"--{flag}"] == value, flag
    assert check.resolve(["STREAM"])["arch"] == "switch_gmoe"
    assert (alma_settings["--decoder-embed-dim"], alma_settings["--decoder-layers"]) == (512, 6)
    assert (alma_settings["--warmup-updates"], alma_settings["--total-num-update"]) == (
        500,
        120_000,
    )
    assert alma_settings["--batch-size-valid"] == 8


def test_given_flags_override_the_defaults():
    flags = {"--arch": "switch_gmoe_tiny", "--optimizer": "adamax", "--lr": "2", "--clip-norm": "0"}
    chosen = settings(*(word for pair in flags.items() for word in pair), "--max-sentences=4")
    assert {flag: chosen[flag] for flag in flags} == flags | {"--lr": [2.0], "--clip-norm": 0.0}
    assert (chosen["--batch-size"], chosen["--update-freq"]) == (4, [1])
    chosen = settings("--max-tokens", "512", "--keep-last-epochs", "2")
    assert (chosen["--batch-size"], chosen["--update-freq"], chosen["--max-tokens"]) == (
        None,
        [1],
        512,
    )
    assert not chosen["--no-epoch-checkpoints"]


def test_fairseq_validate_parses_without_defaults():
    """It parses a second time with suppress_defaults, and then expects only what is given."""
    parser = options.get_validation_parser(default_task="alma_lm")
    parsed = options.parse_args_and_arch(
        parser, ["STREAM", "--path", "CKPT"], suppress_defaults=True
    )
    assert vars(parsed) == {"data": "STREAM", "path": "CKPT"}


@pytest.mark.parametrize(
    ("words", "scheduler", "warmup", "total"),
    [
        ("--max-update 400", "polynomial_decay", 40, 400),
        (
            "--max-update 400 --warmup-updates 300 --total-num-update 1000",
            "polynomial_decay",
            300,
            1000,
        ),
        ("--lr-scheduler inverse_sqrt", "inverse_sqrt", 4000, None),  # fairseq's
        ("--schedule continuous --max-update 400", "fixed", 40, None),
        ("--schedule=continuous --lr-scheduler inverse_sqrt", "inverse_sqrt", 4000, None),
    ],
)
def test_the_schedule_follows_the_number_of_updates(words, scheduler, warmup, total):
    chosen = settings(*words.split())
    assert (chosen["--lr-scheduler"], chosen["--warmup-updates"]) == (scheduler, warmup)
    assert chosen.get("--total-num-update") == total


def test_other_tasks_have_fairseqs_defaults_and_errors(capsys):
    words = ("--task", "language_modeling", "--arch", "transformer_lm", "--max-tokens", "512")
    chosen = settings(*words)
    assert (chosen["--optimizer"], chosen["--lr"], chosen["--max-update"]) == (None, [0.25], 0)
    with pytest.raises(SystemExit, match="2"):
        settings(*words, "--max-tokns", "1")
    assert capsys.readouterr().err.startswith("usage: ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("S --max-tokns 1", "unrecognized argument --max-tokns: did you mean --max-tokens?"),
        ("S --max_tokens 1", "unrecognized argument --max_tokens: did you mean --max-tokens?"),
        ("S --zzz 1", "unrecognized argument --zzz"),
        ("S T", "unrecognized argument T"),
        ("S --arch switch_gmo", "--arch switch_gmo: no such choice; did you mean switch_gmoe?"),
        ("S --task alma_ml", "--task alma_ml: no such choice; did you mean alma_lm?"),
        (
            "S --grow-router keep",
            "--grow-router keep: no such choice; choose from preserve, copy, tree",
        ),
        ("S --max-update ten", "--max-update: invalid int value: 'ten'"),
        ("S --update-freq [1,", "--update-freq: invalid value: '[1,'"),
        ("S --adam-betas 1", "--adam-betas: invalid value: '1'"),
        ("S --max-update", "--max-update: expected one argument"),
        (
            "S --lr-scheduler inverse_sqrt --warmup-updates 0",
            "--warmup-updates 0: inverse_sqrt needs 1 or more",
        ),
        (
            "S --arch hf_gpt2",
            "--arch hf_gpt2: the task alma_lm trains switch_gmoe*, transformer_lm, lstm_lm, "
            "fconv_lm, lightconv_lm and your own language models (--user-dir)",
        ),
        (
            "S --arch transformer_lm_wiki103",
            "--arch transformer_lm_wiki103 with --adaptive-softmax-cutoff: "
            "perplexity or FLOPs cannot be measured; leave it out",
        ),
        (
            "S --criterion adaptive_loss",
            "--criterion adaptive_loss: the task alma_lm takes cross_entropy, "
            "chunked_cross_entropy, label_smoothed_cross_entropy",
        ),
        (
            "S --max-target-positions 32",
            "--max-target-positions 32: a block has 512 tokens and could not be evaluated: give "
            "--max-target-positions 512 or more",
        ),
        (
            "S --max-tokens 1024 --max-tokens-valid 256",
            "--max-tokens-valid 256: a block has 512 tokens and could not be evaluated: give "
            "--max-tokens-valid 512 or more",
        ),
        (
            "S --sample-break-mode complete_doc",
            "--sample-break-mode complete_doc: the task alma_lm takes none",
        ),
        (
            "S --ddp-backend fully_sharded",
            "--ddp-backend fully_sharded: the task alma_lm takes pytorch_ddp, c10d, legacy_ddp, "
            "no_c10d",
        ),
        ("S --max-tokens-valid many", "--max-tokens-valid: invalid int value: 'many'"),
        (
            "--max-update 3",
            "no data: give the stream directory, `fairseq-train STREAM --task alma_lm …`",
        ),
    ],
)
def test_an_invalid_command_line_is_one_line(capsys, words, line):
    assert refused(capsys, *words.split()) == line


def test_a_flag_at_its_default_and_a_choice_of_ones_own_are_not_refused(tmp_path):
    (tmp_path / "__init__.py").write_text(
        "from fairseq.optim import register_optimizer\nfrom fairseq.optim.sgd import SGD\n"
        "register_optimizer('own_sgd')(type('OwnSGD', (SGD,), {'__module__': __name__}))\n"
    )
    chosen = settings(
        "--zero-sharding", "none", "--user-dir", str(tmp_path), "--optimizer", "own_sgd"
    )
    assert chosen["--optimizer"] == "own_sgd"


def test_the_literal_command_trains(start, stream, tmp_path):
    flags = "--task alma_lm --arch switch_gmoe_tiny --max-update 2 --tokens-per-sample 64".split()
    done = start("train", stream, *flags, "--save-dir", tmp_path).wait()
    assert done.code == 0, done.output
    assert (
        "defaults of --task alma_lm: --batch-size 8 --update-freq 3 --optimizer adam" in done.output
    )
    assert {path.name for path in tmp_path.glob("*.pt")} == {
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    }


def test_help_lists_the_flags_and_defaults_of_the_task(start):
    done = start("train", "--task", "alma_lm", "--help").wait()
    assert done.code == 0
    assert all(
        flag in done.output for flag in ("--grow-router", "--moe-expert-count", "--adam-betas")
    )
    shown = done.output.partition("defaults of --task alma_lm:")[2]
    assert all(
        f"{flag} {value}" in shown for flag, value in defaults.TRAINING.items() if value is not True
    )


def run(
    command: str, *words: str, path: Path = ROOT, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `python -m fairseq_alma.COMMAND`; modules in `path` come first."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    words = (sys.executable, "-m", f"fairseq_alma.{command}", *words)
    return subprocess.run(
        words, env=environment, cwd=ROOT, input=text, capture_output=True, text=True
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_our_commands_parse_before_torch_and_fairseq_load(command, tmp_path):
    for name in ("torch", "fairseq", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} is imported')")
    helped = run(command, "--help", path=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    if command != "reshard":  # all its flags are fairseq-train's
        wrong = run(command, *(["--out"] if command == "evaluate" else ["--wrong"]), path=tmp_path)
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("error: ")


def test_check_resolves_command_lines_without_warnings():
    lines = [
        ["S", "--arch", "switch_gmoe_tiny"],
        ["S", "--arch", "switch_gmoe_tiny", "--moe-expert-count", "6"],
    ]
    done = run("check", text=json.dumps(lines))
    assert (done.returncode, done.stderr) == (0, "")
    answers = json.loads(done.stdout)
    assert [answer["arch"] for answer in answers] == ["switch_gmoe_tiny"] * 2
    assert [answer["settings"]["--moe-expert-count"] for answer in answers] == [4, 6]
    assert answers[0]["settings"]["--decoder-embed-dim"] == 128
    assert answers[0]["settings"]["--max-tokens"] is None


@pytest.mark.parametrize("text", ["", "[[1]]"])
def test_check_refuses_input_of_another_form(text):
    done = run("check", text=text)
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input")


OWN_TASK = """
from fairseq.tasks import LegacyFairseqTask, register_task

@register_task("task_of_a_program")
class OwnTask(LegacyFairseqTask):
    @staticmethod
    def add_args(parser):
        parser.add_argument("data")
"""


def test_a_task_of_a_user_dir_that_a_program_names_is_not_ours(tmp_path):
    """The program makes its parser before the words name the folder, as fairseq's own tests do."""
    (tmp_path / "own_task").mkdir()
    (tmp_path / "own_task" / "__init__.py").write_text(OWN_TASK)
    parser = options.get_training_parser()
    words = ["STREAM", "--task", "task_of_a_program", "--user-dir", str(tmp_path / "own_task")]
    args = options.parse_args_and_arch(parser, [*words, "--arch", "transformer_lm"])
    assert (args.task, args.max_update) == ("task_of_a_program", 0)

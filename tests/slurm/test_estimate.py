"""Cost estimates counted by hand, and runs that are refused before anything is written."""

from pathlib import Path

import pytest
from launcher import ESTIMATE, read_requests

from alma.cost_table import total
from alma.errors import UserError
from slurm.engine.machine import Machine
from slurm.lm import late
from slurm.lm.announce import check_fit as check
from slurm.lm.announce import table
from slurm.lm.estimate import Estimate, estimate, largest_share, vocabulary_size
from slurm.lm.late import LateTest
from slurm.lm.placement import place
from slurm.lm.plan import make_plan
from slurm.lm.run_options import tokens_of_batch

TABLE2 = str(Path(__file__).parents[2] / "experiments/table2.yaml")
CPU = Machine((), 10**12)
V100S = Machine((32 * 10**9,) * 8, None)
ONE_GPU = Machine((8 * 10**9,), None)
# L 2, D 8, F 32, V 10 + 4, P 16, E 4: embeddings (14 + 18) * 8, attention and norms 2 * (4 * 72 +
# 32), a dense FFN of 552, the last norm 16: 1464 shared; 552 and a router row of 8 in each expert.
# A token's forward pass: 2 * (2 * (256 + 512) + 8 * E + 14 * 8) = 3296 + 16 * E FLOPs.
TINY = """
    --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 8 --tokens-per-sample 16
    --batch-size 4 --update-freq 2 --max-update 10
""".split()


def estimated(
    *words: str,
    flags: str = "",
    vocabulary: int | None = 10,
    machine: Machine = CPU,
    out: Path | str = "R",
) -> Estimate:
    """Estimate of a run on 4 mega-batches with TINY and `flags`."""
    words = words if "--learner" in words else ("--learner", "sm", *words)
    return of_words(
        "S",
        "--out",
        str(out),
        *words,
        "--",
        *TINY,
        *flags.split(),
        vocabulary=vocabulary,
        machine=machine,
    )


def of_words(
    *words: str, vocabulary: int | None, machine: Machine = CPU, megabatches: int = 4
) -> Estimate:
    (request,) = read_requests(words)
    return estimate(make_plan(place(request, machine), megabatches), vocabulary, machine)


def test_a_late_test_of_an_ensemble_costs_that_of_all_its_models(monkeypatch):
    """Also of the window of stages that gens deploys."""

    def announced(*words: str, stage: int | None) -> str:
        (request,) = read_requests(["S", "--out", "R", *words, "--", *TINY])
        plan = make_plan(place(request, CPU), 4)
        test = LateTest(stage=stage, megabatches=(4,), periods="2024-04", tokens=10**12)
        monkeypatch.setattr(late, "late_tests", lambda plan: [test])
        return late.announcement(plan, 10, CPU)[0]

    flops_of_token = 3296 + 16 * 4
    for words, stage, models in (
        (("--learner", "sm"), 2, 1),
        (("--learner", "ens", "--members", "3"), None, 3),
        (("--learner", "ens", "--members", "3"), 2, 3),
        (("--learner", "gens"), 2, 3),
    ):
        assert f" {models * flops_of_token:,} TFLOPs" in announced(*words, stage=stage)


def totals(estimate: Estimate) -> list[int | None]:
    """Updates, tokens and FLOPs of all trainings."""
    return [
        total(getattr(cost, name) for cost in estimate.costs)
        for name in ("updates", "tokens", "flops")
    ]


@pytest.mark.parametrize(
    ("words", "experts", "parameters", "updates", "tokens", "flops"),
    [
        (["--learner", "sm"], "4", 3704, 40, 5120, 5120 * 3 * 3360),
        (["--learner", "ens", "--members", "3"], "4@3", 3 * 3704, 120, 15360, 15360 * 3 * 3360),
        (["--learner", "umix"], "4@2", 2 * 3704, 40, 5120, 2 * 5120 * 3 * 3360),
        (["--learner", "gens"], "4@4", 4 * 3704, 40, 5120, 5120 * 3 * 3360),
        (
            ["--learner", "gens", "--new-members", "2"],
            "4@8",
            8 * 3704,
            80,
            10240,
            10240 * 3 * 3360,
        ),
        (
            ["--learner", "gmoe"],
            "4->10",
            1464 + 10 * 560,
            40,
            5120,
            1280 * 3 * (4 * 3296 + 16 * 28),
        ),
        (["--update-multiplier", "3", "--waiting-time", "2"], "4", 3704, 60, 7680, 7680 * 3 * 3360),
    ],
)
def test_counts_match_those_by_hand(words, experts, parameters, updates, tokens, flops):
    estimate = estimated(*words)
    assert (estimate.experts, estimate.parameters) == (experts, parameters)
    assert totals(estimate) == [updates, tokens, flops]


@pytest.mark.parametrize(
    ("name", "millions"),
    [("sm4", 63.8), ("sm8", 89.0), ("sm12", 114.2), ("gmoe", 114.2), ("ens2", 127.6)],
)
def test_the_base_size_matches_the_paper(name, millions):
    estimate = of_words(TABLE2, f"runs={name}_w1", vocabulary=50_260, machine=V100S)
    assert round(estimate.parameters / 1e6, 1) == millions
    first = estimate.costs[0]
    assert first.shape.forward_flops(512) / 1e9 == pytest.approx(45.7, rel=2e-3)
    assert (first.updates, first.tokens) == (120_000, 120_000 * 192 * 512)
    check([estimate])  # the paper's cards: 32 GB


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("--batch-size 12", 8 * 16),  # fairseq rounds down to a multiple of 8
        ("--max-sentences 3", 3 * 16),
        ("--max-tokens 60", 3 * 16),
        ("--max-tokens=6000", 4 * 16),
        ("--batch-size 12 --required-batch-size-multiple 1", 12 * 16),
    ],
)
def test_the_batch_matches_fairseq(flags, tokens):
    assert tokens_of_batch(estimated(flags=flags).costs[0].settings) == tokens


def test_unknown_costs_are_question_marks():
    unknown = Machine((), 1)
    lstm = estimated(flags="--arch lstm_lm", machine=unknown)
    assert table([lstm]).splitlines()[1].split() == ["R", "sm", "-", "?", "40", "5,120", "?", "?"]
    without_dictionary = vocabulary_size("missing")
    shapeless = estimated(vocabulary=without_dictionary, machine=unknown)
    endless = estimated(flags="--max-update 0")
    assert totals(endless) == [None] * 3
    assert (
        lstm.parameters
        is shapeless.parameters
        is estimated(flags="--moe-freq 0").parameters
        is None
    )
    check([lstm, shapeless])
    assert table([lstm, endless]).splitlines()[-1].split() == ["total", "?", "?", "?"]


def test_a_dense_model_is_counted_by_hand():
    """L 6, D 512, F 2048, V 10 + 4: without learned positions, with and without tied embeddings."""
    layers = 6 * (4 * (512**2 + 512) + 2 * 512 * 2048 + 2048 + 512 + 4 * 512)
    for flags, matrices in (("", 2), ("--share-decoder-input-output-embed", 1)):
        words = [
            "S",
            "--learner",
            "sm",
            "--out",
            "R",
            "--",
            "--arch",
            "transformer_lm",
            *flags.split(),
        ]
        estimate = of_words(*words, vocabulary=10)
        assert estimate.parameters == layers + matrices * 14 * 512  # post-LN: no last norm
        assert (estimate.experts, estimate.costs[0].shape.switch_layers) == ("-", 0)


def test_the_table_has_totals():
    ens = estimated("--learner", "ens", flags="--max-update 5000000")
    _, *rows = table([estimated("--learner", "gmoe"), ens]).splitlines()
    assert [row.split() for row in rows] == [
        ["R", "gmoe", "4->10", "7,064", "40", "5,120", "5.2e-05", "1.0"],
        ["R", "ens", "4@2", "7,408", "40,000,000", "5,120M", "51.6", "1.0"],
        ["total", "40,000,040", "5,120M", "51.6"],
    ]


def memory(flags: str, gpus: int = 1, vocabulary: int = 10) -> int:
    """Bytes of one process."""
    machine = Machine((8 * 10**9,) * gpus, None)
    return estimated(flags=flags, vocabulary=vocabulary, machine=machine).costs[0].memory


def test_sharding_saves_the_moments_of_the_other_shares():
    """V 14, P 18 and D 8 begin with parameters of 112 and 144 elements;
    Switch layers have the largest."""
    whole = estimated(flags="--distributed-world-size 2").costs[0]
    sizes = whole.shape.parameter_sizes
    assert sum(sizes) == whole.shape.parameters == 3704
    assert sizes[:3] == [14 * 8, 18 * 8, 8 * 8]
    assert largest_share([112, 144, 64, 8], 2) == 112 + 64
    share = largest_share(sizes, 2)
    assert 1852 <= share < 2000
    saved = memory("", gpus=2) - memory("--zero-sharding os", gpus=2)
    assert saved == 8 * (3704 - share)
    one_moment = ("--optimizer nag", "--optimizer nag --zero-sharding os")
    assert memory(one_moment[0], gpus=2) - memory(one_moment[1], gpus=2) == saved // 2


def test_offloaded_activations_are_in_the_memory_of_the_host():
    """The input of each of 2 layers: 4 sequences of 16 tokens of width 8, in fp32."""
    flags = "--checkpoint-activations --distributed-world-size 1"
    stays, moved = (
        estimated(flags=words, vocabulary=1000, machine=ONE_GPU).costs[0]
        for words in (flags, f"{flags} --offload-activations")
    )
    layers = 2 * 4 * 16 * 8 * 4
    assert stays.memory - moved.memory == layers
    assert moved.host_memory(3) - stays.host_memory(3) == 3 * layers


@pytest.mark.parametrize(
    ("flags", "bytes_a_parameter"),
    [
        ("--distributed-world-size 1", 12),
        ("--optimizer sgd --distributed-world-size 1", 4),
        ("--store-ema --distributed-world-size 1", 16),
        ("--distributed-world-size 2", 16),
        ("--fp16 --distributed-world-size 1", 18),
        ("--memory-efficient-fp16 --distributed-world-size 1", 10),
        ("--bf16 --distributed-world-size 2", 20),
    ],
)
def test_memory_per_parameter(flags, bytes_a_parameter):
    """At the loss, where no gradient exists: vocabularies of 10 and 11 tokens differ by 8
    parameters, by the logits of a batch of 64 tokens, which become their own gradient, and by the
    gradient of 8 weights."""
    few, many = (memory(flags, gpus=2, vocabulary=size) for size in (10, 11))
    width = 2 if "16" in flags else 4
    assert many - few == 8 * bytes_a_parameter + 64 * width + 8 * width


def test_expert_parallelism_and_chunked_logits_save_memory():
    all_experts, half = (memory(flags, gpus=2) for flags in ("", "--moe-expert-parallel"))
    # 2 of the 4 experts, each with its router row, and the copies of all gradients in buckets.
    assert all_experts - half == 560 * (2 * 12 + 4 * 4)
    whole, chunked = map(memory, ("", "--criterion chunked_cross_entropy --loss-chunk-tokens 24"))
    assert whole - chunked == (64 - 24) * 4 * 14  # both have a gradient of the output weights


@pytest.mark.parametrize(
    ("flags", "gigabytes"),
    [
        ("switch_gmoe_tiny --tokens-per-sample 128 --batch-size 8", 1.125),
        (
            "switch_gmoe_tiny --decoder-embed-dim 256 --tokens-per-sample 128 --max-tokens 2048",
            1.347,
        ),
        ("switch_gmoe_base --tokens-per-sample 512 --batch-size 2", 1.959),
        ("switch_gmoe_base --tokens-per-sample 512 --batch-size 2 --members 2", 2.929),
        ("SWITCHLESS", 1.977),
        ("SWITCHLESS --moe-freq 1", 2.433),
        ("SWITCHLESS --attention-dropout 0.1", 2.859),
        ("SWITCHLESS --checkpoint-activations", 1.583),
    ],
)
def test_memory_is_near_that_of_fairseq_train(flags, gigabytes):
    """Peak resident memory of 3 updates on a CPU, torch 2.13, a vocabulary of 4,000 tokens."""
    deep = "switch_gmoe_tiny --decoder-embed-dim 256 --decoder-layers 8 --moe-freq 100"
    words = flags.replace("SWITCHLESS", f"{deep} --tokens-per-sample 512 --batch-size 8").split()
    learner = ["--learner", "sm"]
    if "--members" in words:
        words = words[: words.index("--members")]
        learner = ["--learner", "umix"]
    estimate = of_words(
        "S", "--out", "R", *learner, "--", "--arch", *words, "--cpu", vocabulary=4000
    )
    assert estimate.memory / 1e9 == pytest.approx(gigabytes, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "machine", "message", "larger"),
    [
        (
            "--batch-size 800000",
            Machine((), 10**10),
            "this machine has free 10.0 GB: .* --batch",
            (10**13,),
        ),
        (
            "--cpu --distributed-world-size 9",
            Machine((), 8 * 10**9),
            "9.0 GB of memory for 9 pro",
            (10**10,),
        ),
        (
            "--batch-size 800000",
            ONE_GPU,
            "a GPU here has 8.0 GB: .*--checkpoint-activations or --fp16",
            (),
        ),
        ("--fp16", CPU, "--fp16 needs a GPU, and this machine has none", ()),
    ],
)
def test_runs_that_do_not_fit_are_refused(flags, machine, message, larger):
    with pytest.raises(UserError, match=message) as refused:
        check([estimated(machine=CPU), estimated(flags=flags, machine=machine, out="big")])
    assert str(refused.value).startswith("big: ")
    assert "\n" not in str(refused.value)
    for memory in larger:
        check([estimated(flags=flags, machine=Machine((), memory))])


def test_a_complete_run_always_fits(tmp_path):
    estimate = estimated(flags="--fp16", machine=Machine((), 1), out=tmp_path)
    for stage in range(4):
        with pytest.raises(UserError):
            check([estimate])
        (tmp_path / f"stage_{stage:02d}").mkdir()
        (tmp_path / f"stage_{stage:02d}/result.json").touch()
    check([estimate])


def test_the_launcher_refuses_before_it_writes_anything(launcher, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda: Machine((), 10**8))
    before = sorted(launcher.folder.rglob("*"))
    out, err = launcher.run(code=2, flags=TINY)
    need = "error: run: training needs about 1.0 GB of memory, and this machine has free 0.1 GB"
    assert err.splitlines()[-1].startswith(need)
    assert (err.count("\n"), out) == (ESTIMATE + 1, "")
    assert sorted(launcher.folder.rglob("*")) == before

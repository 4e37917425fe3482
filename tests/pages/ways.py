"""How each block of commands on the pages is checked: the table of tests/pages.

`WAYS` has the blocks of a page in their order, by the words with which they start. A block that no
entry accounts for, and an entry without a block, fail `make test`.

`Run` types the block as it stands, the blocks of a page one after the other in one folder. The
program `alma` in its PATH adds words that make the work small. A block that cannot run is a
`Parse`, and says why: its commands are parsed by the programs' own parsers, as those of all blocks
are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.pages import materials
from tests.pages.materials import Material


@dataclass(frozen=True)
class Run:
    """The block is typed as it stands."""

    needs: tuple[Material, ...] = ()
    """Makers of what the reader has; each is called once for a page."""
    adds: Mapping[str, str] = field(default_factory=dict)
    """Words that `alma` adds, by a pattern at which its words start; before those of `SMALL`."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Text of the block, and what stands in its place: what this machine cannot do."""
    slurm: bool = False
    """With the real SLURM of tests/slurm."""
    stand_in: bool = False
    """fairseq's trainings are those of tests/slurm/fake: many, large or on GPUs."""
    saves: str = ""
    """The file that the block is, in place of typing it."""
    folder: str = ""
    """In which the block is typed, below that of the page."""
    codes: tuple[int, ...] = (0,)
    """Exit codes that are answers."""
    prints: tuple[str, ...] = ()
    """Words in its output."""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Parse:
    """The block cannot be typed here, and its commands are parsed only."""

    reason: str


@dataclass(frozen=True)
class RunBy:
    """Another test types the block; it names the page or its command."""

    test: str
    names: str


@dataclass(frozen=True)
class SameAs:
    """A block of another page has all of these commands, and is typed."""

    page: str


Way = Run | Parse | RunBy | SameAs

_TINY_PARTS = "--words 2k --eval-words 300 --valid-words 200"
_MANY_IMAGES = "--megabatches 4 --waiting-time 1,4 --hidden 2 --epochs 1 --seeds 0"
SMALL = {
    r"data (?!.*--append).*--(tokenizer|bpe) ": _TINY_PARTS,
    r"data (?!.*--append)": f"{_TINY_PARTS} --vocab-size 300",
    r"images .*experiments/\S+ .*--size small": "--epochs 1",
    r"images .*--dataset cifar10": f"--dataset mnist {_MANY_IMAGES}",  # which is not made up
    r"images .*(--dataset mnist|experiments/)": _MANY_IMAGES,
    r"images .*--dataset folder": "--megabatches 10 --epochs 1",
    r"images ": "--epochs 1",
    r"train .*--trainer ": "--budget updates=2",
    r"train .* -- ": "--max-update 2",
    r"train text.yaml ": "max-update=4 warmup-updates=1",
    r"train experiments/(averages|drift)/": "max-update=8 save-interval-updates=1 --seeds 0",
    r"train experiments/.*--seed ": "max-update=4 warmup-updates=1",
    r"train experiments/": "max-update=4 warmup-updates=1 --seeds 0",
}
"""Words that `alma` adds, by a pattern at which its words start; the first that fits."""

INSTALLS = Parse(
    "installs packages of the system, makes .venv and starts all tests; tests/slurm/test_demo.py "
    "has the commands of `make demo`"
)
LIGHT = RunBy("tests/test_install.py", "python3 -m venv light")
GPU = Parse("ten minutes of a GPU; tests/benchmarks/test_gpu.py runs the steps at tiny sizes")

MLFLOW = RunBy("tests/alma/test_mlflow.py", "docs/trackers.md")
"""Where MLflow is installed: it is not in the extra `all`."""

AS_IT_STANDS = {"": ""}
_ON_SLURM = (
    "alma train experiments/table2.yaml runs=gmoe_w1 --stream stream --seeds 0-2 "
    "--cluster slurm \\\n    --partition learn --sbatch account=nlp"
)

_REPRODUCE_TIME = "alma reproduce time --stream stream_git\n"
_SOME_RUNS_OF_TIME = """\
alma reproduce time --stream stream_git --dry-run
mkdir -p reproduced/small
cp -RL experiments stream_git reproduced/small
(cd reproduced/small && alma train experiments/time.yaml runs=stage --stream stream_git)
"""
"""Four of its 42 runs."""

WAYS: dict[str, dict[str, Way]] = {
    "README.md": {
        "python3 -m venv light": LIGHT,
        "sudo apt install": INSTALLS,
    },
    "CONTRIBUTING.md": {
        "make test": Parse("all tests, of which this is one"),
        "pytest tests/alma/test_stages.py": Parse("minutes of tests, and those of a GPU"),
    },
    "docs/trackers.md": {
        "alma advise --mlflow": MLFLOW,
        "alma report runs/digits --mlflow": MLFLOW,
    },
    "docs/advice.md": {
        "alma images --learner sm,ens": Run(),
        "alma advise --matrix accuracy.csv": Run(
            (materials.matrices,), prints=("How often to retrain?",)
        ),
    },
    "docs/advice-accuracy.md": {},
    "docs/advice-method.md": {
        "alma images --dataset mnist": Run(
            (materials.mnist,),
            {r"images ": "--hidden 2,4 --waiting-time 1,3 --megabatches 30 --epochs 1 --seeds 0-1"},
        ),
        "with open": Run(),
        "alma advise --matrix": Run(prints=("How often to retrain?",)),
    },
    "docs/anytime.md": {},
    "docs/concepts.md": {"alma images": Run()},
    "docs/data.md": {
        "alma corpus pydoc topics": Run(adds=AS_IT_STANDS, prints=("megabatch_03",)),
        "alma data wiki=wiki.txt.zst": Run((materials.text_files,)),
        "alma data news=news_hub/": Run((materials.hub_folder,), prints=("left out: split test",)),
        "alma data wiki=wiki.txt.zst books=books/ --out stream_gpt2": Run((materials.gpt2_units,)),
        "alma data chats.parquet": Run((materials.chats,)),
        "alma data web=crawl2.jsonl.gz": Run(),
        "alma data corpus/topics.jsonl stdlib+": Run(adds=AS_IT_STANDS),
        "alma data 2023=": Run(),
        "alma data news": Run((materials.dated_files,), prints=("2025",)),
        "alma corpus git": Run((materials.history_of_git,)),
        "alma data 'web=cc": Run(
            adds={r"data ": f"{_TINY_PARTS} --vocab-size 300 --workers 2"},
            slurm=True,
        ),
        "alma inspect stream": Run(),
    },
    "docs/decisions.md": {"alma due": Run((materials.run_by_week,), codes=(0, 1, 3))},
    "docs/extend.md": {
        "python mine.py": RunBy("tests/test_extend.py", "extend.md"),
        "alma images --learner sm,restart": RunBy("tests/test_extend.py", "extend.md"),
        "alma train stream --learner recent": RunBy("tests/test_extend.py", "extend.md"),
    },
    "docs/extend_more.md": {
        "tar": RunBy("tests/test_extend.py", "extend_more.md"),
        "alma train code": RunBy("tests/test_extend.py", "extend_more.md"),
        "alma report": RunBy("tests/test_extend.py", "extend_more.md"),
    },
    "docs/fairseq.md": {
        "fairseq-train": Run((materials.stream,), instead={"--max-update 40": "--max-update 2"}),
        "alma train data-bin": Run((materials.ids_of_gpt2,)),
        "fairseq-eval-lm": Run(),
        "alma export": Run(),
    },
    "docs/images.md": {
        "alma images --learner sm,ens,gmoe": Run(),
        "alma images --dataset mnist --download": Run((materials.mnist, materials.image_folder)),
        "alma images --dataset folder --data-root images --image-size 64": Run(),
        "alma images --dataset mnist --learner sm,ens --seeds": Run(),
        "alma images experiments/figure7.yaml": Run(),
        "alma images --scenario classes": Run(),
        "alma images experiments/drift": Run(),
        "alma images --scenario rotated": Run(),
        "alma images --learner sm,ens --average": Run(),
        "alma images --preset anytime": Run(),
        "alma images --dataset folder --data-root images --image-size 32": Run(
            (materials.image_folder,)
        ),
        "alma export runs/mine": Run(),
        "from alma": Run(),
        "import numpy": Run(),
        "alma images --learner gmoe": Run(),
    },
    "docs/index.md": {"alma images": Run()},
    "docs/install.md": {
        "python3 -m venv light": LIGHT,
        "sudo apt install": INSTALLS,
        "python -m benchmarks gpu all": GPU,
        "python -m benchmarks gpu wheels": Parse("downloads wheels"),
    },
    "docs/language.md": {
        "alma train stream --learner gmoe": Run((materials.stream,)),
        "alma train stream --learner sm --out runs/sm_w2": Run(),
        "alma train stream --learner sm --out runs/continuous": Run(),
        "alma train stream --learner sm --preset": Run(),
        "alma train stream --learner sm --out runs/replay": Run(),
        "alma export runs/gmoe": Run(),
        "alma train experiments/table2.yaml runs=gmoe_w1 --stream stream\n": Run(
            (materials.stream,),
            {
                r"train (?!.*--size)": "arch=switch_gmoe_tiny fp16=false distributed-world-size=1 "
                "max-update=4 warmup-updates=1"
            },
            stand_in=True,
        ),
        "alma train experiments/table2.yaml runs=gmoe_w1 --stream stream --size": Run(),
        "alma train experiments/tune.yaml": Run(stand_in=True),
        "alma report runs/table2": Run(),
    },
    "docs/matrix.md": {
        "alma matrix models": Run(
            (materials.models_by_month,),
            adds={r"matrix .*--dry-run": "", r"matrix ": "--device cpu"},
            prints=("its name", "How often to retrain?"),
        ),
        "import json\nimport sys": Run(saves="eval.py"),
        "import json\n\nwith": Run(),
        "alma matrix sales": Run(prints=("MAPE", "How often to retrain?")),
    },
    "docs/month.md": {
        "sh examples/monthly/run.sh images": Run(),
        "git clone": Run((materials.history_of_git,)),
        "BY=year": Run(instead={"60k": "2k", "20k": "300", "2012 2013 2014 2015": "2012 2013"}),
        "mkdir -p service": Run((materials.service,)),
        "sh month.sh": Run(folder="service"),
        "#!/bin/sh": Run(saves="service/service.sh"),
        "0 6 2 * *": Run((materials.april,), instead={"0 6 2 * * ": "", " || echo": " && echo"}),
        "alma test run": Run((materials.may,), slurm=True, folder="service"),
        "ln -sfn 6": Run(folder="service"),
        "alma export run --t 5": Run(folder="service"),
        "alma report run": Run(folder="service"),
    },
    "docs/outputs.md": {"alma images": Run(), "import json": Run()},
    "docs/quickstart.md": {
        "sudo apt install": INSTALLS,
        "alma images": Run(),
        "alma reproduce figure7 --size paper": Run((materials.mnist,)),
        "alma reproduce table2 --size small": Run(stand_in=True),
    },
    "docs/reproduce.md": {
        "alma reproduce figure7": SameAs("docs/quickstart.md"),
        "alma data books": Run((materials.text_files, materials.gpt2_units), slurm=True),
        "alma train experiments/table2.yaml --megabatches": Run(),
        "alma data wiki=wiki.txt books": Run(stand_in=True),
        "alma data wiki=wiki.txt --out stream_saturated": Run(
            adds={r"reproduce ": "--dry-run"}  # 86 trainings
        ),
    },
    "docs/results/age.md": {
        "git clone": Run(
            (materials.history_of_git,),
            instead={_REPRODUCE_TIME: _SOME_RUNS_OF_TIME},
            stand_in=True,
        ),
        "alma report runs/drifting": Run(
            instead={"runs/drifting": "reproduced/small/runs/time"}  # the reader's runs
        ),
    },
    "docs/results/average.md": {
        "alma images experiments/averages": Run((materials.mnist,)),
        "alma images experiments/recipe/grid.yaml": Run(),
        "alma images --dataset cifar10": Run(),
        "alma train experiments/averages/language.yaml": Run(
            (materials.stream_of_average,), stand_in=True
        ),
    },
    "docs/results/cadence.md": {
        "python -m benchmarks cadence_calibration": Run(
            instead={"--out results/cadence": "--out results/cadence --per-kind 1"},
            prints=("a step every 6 months",),
        ),
    },
    "docs/results/grow.md": {
        "alma data wiki": Run((materials.text_files,), stand_in=True),
    },
    "docs/results/order.md": {
        "alma data wiki": Run((materials.text_files,), stand_in=True),
    },
    "docs/results/replay.md": {
        "alma images --dataset mnist": Run((materials.mnist,)),
        "alma images experiments/drift": Run(),
        "alma train experiments/drift": Run((materials.drifting_stream,), stand_in=True),
    },
    "docs/results/retraining.md": {
        "git clone --bare": RunBy(
            "tests/benchmarks/test_retraining_streams.py", "python -m benchmarks retraining"
        ),
        "python -m benchmarks retraining_forecast": RunBy(
            "tests/benchmarks/test_retraining_forecast.py", "retraining_forecast"
        ),
    },
    "docs/results/wait.md": {
        "alma images --dataset mnist": Run((materials.mnist,)),
        "alma images experiments/draft": Run(),
    },
    "docs/slurm.md": {
        f"{_ON_SLURM} --dry-run": Run((materials.stream,), slurm=True, stand_in=True),
        f"{_ON_SLURM}\n": Run(slurm=True, stand_in=True),
        "alma train experiments/table2.yaml runs=sm12_w1": Run(
            adds={r"train ": "max-update=4 warmup-updates=1 --mem-gb 100"},
            slurm=True,
            stand_in=True,
        ),
        "alma images": Run((materials.mnist,), slurm=True),
    },
    "docs/time.md": {
        "git clone": Run(
            (materials.history_of_git,),
            prints=("megabatch_02", "Loss against age", "How often to retrain?", "replay?"),
        ),
        "python examples/tiny_model.py": Run(
            adds={r"train ": "--max_steps 3"}, prints=("transformers trains qwen2", "replay?")
        ),
        "alma data web": Run((materials.dated_files,)),
    },
    "docs/trainers.md": {
        "alma corpus pydoc stdlib --max-words 150k --out corpus/stdlib.jsonl\npython": Run(
            adds={r"data ": "", r"train ": "--max_steps 4"},
            prints=("transformers trains qwen2", "replay 0.5", "own/qwen_now: a copy of"),
        ),
        "hf download": Run((materials.gpt2_model,), adds={r"data ": ""}),
        "alma corpus pydoc stdlib --max-words 150k --out corpus/stdlib.jsonl\nalma": Run(),
    },
    "docs/weekly-images.md": {
        "python examples/weekly_digits.py shop --weeks 1-11": Run(),
        "python examples/weekly_digits.py shop --weeks 12-12": Run(),
        "alma predict": Run(),
        "alma images --manifest": Run((materials.boxes_by_week,)),
    },
    "examples/wiki/README.md": {
        "examples/wiki/run.sh": RunBy("tests/test_examples.py", 'WIKI / "run.sh"'),
        "WORDS=5M": Parse("downloads 20 GB; tests/test_examples.py runs the script"),
    },
}

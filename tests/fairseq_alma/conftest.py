"""Small Switch models and fairseq-train command lines."""

import json
import shutil
import socket

import pytest
import torch

from tests.fairseq_alma.shared import config_of, load

TINY = """
    --task alma_lm --arch switch_gmoe_tiny --decoder-layers 2 --decoder-embed-dim 32
    --decoder-attention-heads 2 --tokens-per-sample 64 --max-tokens 512 --optimizer adam --lr 5e-3
    --lr-scheduler polynomial_decay --total-num-update 20 --max-update 20 --warmup-updates 2
    --dropout 0.1 --log-format json --log-interval 5 --num-workers 0 --no-epoch-checkpoints --seed 7
"""


@pytest.fixture
def tiny() -> list[str]:
    """fairseq-train's flags for a model that trains in a second."""
    return TINY.split()


@pytest.fixture
def train(start, stream, tiny):
    """`train(save, *flags)` trains with the tiny flags and these, and returns the output."""

    def run(save, *flags, data=stream) -> str:
        done = start("train", data, *tiny, "--save-dir", save, *flags).wait()
        assert done.code == 0, done.output
        return done.output

    return run


@pytest.fixture(scope="session")
def finished_trainings(tmp_path_factory) -> tuple:
    """A folder, and the numbers there of the trainings of each tuple of flags."""
    return tmp_path_factory.mktemp("finished"), {}


@pytest.fixture
def train_once(train, finished_trainings):
    """`train_once(save, *flags)`: as `train`, but equal flags train once;
    returns the last checkpoint."""
    folder, numbers = finished_trainings

    def run(save, *flags):
        finished = folder / str(numbers.setdefault(flags, len(numbers)))
        if not finished.exists():
            train(finished, *flags)
        shutil.copytree(finished, save)
        return save / "checkpoint_last.pt"

    return run


@pytest.fixture
def stage0(train_once, tmp_path):
    """The last checkpoint of stage 0, with 4 experts."""
    return train_once(tmp_path / "stage_00")


@pytest.fixture
def last_of(train):
    """As `train`, but it returns the last checkpoint."""

    def run(save, *flags) -> dict:
        train(save, *flags)
        return load(save / "checkpoint_last.pt")

    return run


@pytest.fixture
def evaluate(start, stream, tmp_path):
    """`evaluate(*flags)` -> what `python -m fairseq_alma.evaluate` writes."""

    def run(*flags, data=stream) -> dict:
        out = tmp_path / "result.json"
        done = start("evaluate", data, "--task", "alma_lm", "--out", out, *flags).wait()
        assert done.code == 0, done.output
        return json.loads(out.read_text())

    return run


@pytest.fixture
def build(stream):
    """`build(*flags)` -> (task, model) as fairseq-train would make them from the tiny flags and
    these."""
    from fairseq import options, tasks, utils
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY

    def run(*flags: str, data=stream):
        words = list(map(str, (data, *TINY.split(), *flags)))
        args = options.parse_args_and_arch(
            options.get_training_parser(default_task="alma_lm"), words
        )
        args._name = ARCH_MODEL_NAME_REGISTRY[args.arch]
        vars(args).update(vars(MODEL_DATACLASS_REGISTRY[args._name].from_namespace(args)))
        utils.set_torch_seed(args.seed)
        task = tasks.setup_task(args)  # not of a config: Hydra needs half a second
        return task, task.build_model(args)

    return run


@pytest.fixture
def untrained(build, stream, tiny, tmp_path):
    """`untrained(name, *flags, change=None)` -> (path, model, task);
    `change(model)` comes before saving."""
    from omegaconf import OmegaConf

    def run(name, *flags, change=None):
        flags = ("--seed", "1", *flags)
        cfg = config_of(stream, *tiny, *flags)
        task, model = build(*flags)
        model.eval()
        if change:
            change(model)
        history = {
            "criterion_name": "",
            "optimizer_name": "",
            "lr_scheduler_state": {},
            "num_updates": 1,
        }
        state = {
            "args": None,
            "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
            "model": model.state_dict(),
            "optimizer_history": [history],
            "extra_state": {"train_iterator": {"epoch": 1}},
            "last_optimizer_state": {"state": {}},
        }
        torch.save(state, tmp_path / name)
        return tmp_path / name, model, task

    return run


@pytest.fixture
def start_two(start):
    """`start_two(*arguments)`: fairseq-train in two gloo processes,
    started as torchrun starts them."""

    def run(*arguments, environment: dict[str, str] | None = None) -> list:
        with socket.socket() as server:
            server.bind(("localhost", 0))
            port = str(server.getsockname()[1])
        common = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
            "WORLD_SIZE": "2",
            **(environment or {}),
        }
        return [
            start("train", *arguments, environment={**common, "RANK": rank}) for rank in ("0", "1")
        ]

    return run


@pytest.fixture
def train_on_two(start_two, stream, tiny):
    """`train_on_two(save, *flags)` trains in two gloo processes, and returns the output of both."""

    def run(save, *flags) -> list[str]:
        done = [child.wait() for child in start_two(stream, *tiny, "--save-dir", save, *flags)]
        assert [child.code for child in done] == [0, 0], done[0].output + done[1].output
        return [child.output for child in done]

    return run


@pytest.fixture
def user_dir(tmp_path):
    """`user_dir(code)`: the flags with which fairseq runs `code` before it trains."""

    def make(code: str) -> tuple:
        directory = tmp_path / "user_dir"
        directory.mkdir(exist_ok=True)
        (directory / "__init__.py").write_text(code)
        return ("--user-dir", directory)

    return make


@pytest.fixture
def sample(stream):
    """A batch of 4 sequences of 64 tokens, in fairseq's form."""
    tokens = torch.randint(4, 1000, (4, 64), generator=torch.Generator().manual_seed(0))
    target = torch.roll(tokens, -1, dims=1)
    return {
        "id": torch.arange(4),
        "nsentences": 4,
        "ntokens": tokens.numel(),
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((4,), 64)},
        "target": target,
    }


@pytest.fixture(scope="session")
def preprocessed(stream, text, tmp_path_factory) -> str:
    """The text as fairseq-preprocess makes it: pieces, a blank line between documents, two
    shards."""
    import sentencepiece
    from fairseq import options
    from fairseq_cli.preprocess import main

    directory = tmp_path_factory.mktemp("preprocessed")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(stream / "tokenizer.model"))
    for shard, name in enumerate(("help", "reference")):
        lines = (text / f"{name}.txt").read_text().splitlines()
        encoded = "\n".join(" ".join(pieces.encode(line, out_type=str)) for line in lines) + "\n"
        (directory / f"{name}.pieces").write_text(encoded)
        out = directory / f"shard{shard}"
        flags = f"--only-source --workers 1 --srcdict {stream}/dict.txt --destdir {out} --trainpref"
        main(
            options.get_preprocessing_parser().parse_args(
                [*flags.split(), f"{directory}/{name}.pieces"]
            )
        )
        for suffix in (".bin", ".idx"):
            shutil.copy(stream / f"valid{suffix}", out / f"valid{suffix}")
    return f"{directory}/shard0:{directory}/shard1"

"""FSDP2 on two gloo processes: kill, resume, and a whole model at the end.

accelerate shards models on GPUs alone, which `alma train` says in a line. Here its state is told
otherwise; torch itself shards on a CPU too.
"""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from alma.errors import UserError
from tests.transformers_alma import tiny


@pytest.fixture(scope="module")
def train(tiny_engine):
    """`train(out, hook, is_sharded)`: train by two processes, in forks."""
    from transformers_alma import training

    def run(out: Path, hook: Callable[[], object] = bool, is_sharded: bool = True) -> list:
        arguments = tiny_engine.arguments("--num_processes", "2")
        task = tiny.task(out, tiny_engine.parts)

        def work() -> None:
            torch.set_num_threads(1)
            if is_sharded:
                arguments.training["fsdp"] = True
                shard_on_cpu()
            hook()
            training.train(task, arguments)

        logs = out.with_name(f"{out.name}_logs_{time.monotonic_ns()}")
        return tiny.together([work, work], logs)

    return run


def shard_on_cpu() -> None:
    from accelerate import state
    from accelerate.utils import DistributedType

    begin = state.AcceleratorState.__init__

    def replaced(self, *args, fsdp_plugin=None, **kwargs) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    state.AcceleratorState.__init__ = replaced


def kill_before(step: int) -> None:
    """Kill this process in an update, if it is the second one."""
    from transformers import Trainer

    compute = Trainer.training_step

    def replaced(trainer: Trainer, *args: object, **kwargs: object):
        if os.environ["RANK"] == "1" and trainer.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute(trainer, *args, **kwargs)

    Trainer.training_step = replaced


def must_be_sharded() -> None:
    from transformers_alma import training

    write = training._write_model

    def replaced(trainer, *args) -> None:
        kinds = {type(weight).__name__ for weight in trainer.model.parameters()}
        assert kinds == {"DTensor"}, kinds
        write(trainer, *args)

    training._write_model = replaced


@pytest.mark.thorough
def test_a_sharded_training_resumes_and_ends_with_a_whole_model(train, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    whole = train(tmp_path / "whole", must_be_sharded)
    assert [child.code for child in whole] == [0, 0], whole
    killed = train(tmp_path / "killed", partial(kill_before, 4))
    assert killed[1].code == -signal.SIGKILL, killed
    refused = train(tmp_path / "killed", is_sharded=False)
    assert "checkpoint-2: saved by FSDP and several processes: start as before" in refused[0].output
    done = train(tmp_path / "killed")
    assert [child.code for child in done] == [0, 0], done
    assert [update for update, _ in tiny.losses(done[0].output)] == [3, 4, 5, 6]
    assert tiny.checksums(tmp_path / "killed") == tiny.checksums(tmp_path / "whole")
    unsharded = train(tmp_path / "unsharded", is_sharded=False)
    assert [child.code for child in unsharded] == [0, 0], unsharded
    of_all = load_file(tmp_path / "unsharded/weights/model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/weights")
    for name, weight in model.state_dict().items():
        if name in of_all:
            torch.testing.assert_close(weight, of_all[name], rtol=1e-4, atol=1e-5)


def test_fsdp_on_a_cpu_is_refused(train):
    from transformers_alma.arguments import parse

    with pytest.raises(UserError, match="--use_cpu: accelerate shards models .* on GPUs alone"):
        parse(["--use_cpu", "--fsdp", "--num_processes", "2"])


def test_an_average_of_shares_is_refused(train):
    from transformers_alma.arguments import parse

    with pytest.raises(UserError, match=r"--average \.9: .* with FSDP: leave out --average"):
        parse(["--fsdp", "--num_processes", "2", "--average", ".9"])

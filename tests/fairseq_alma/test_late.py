"""Updates read their norm and statistics late, and compute what fairseq's compute.

test_interrupt tests resuming, test_expert_parallel several processes.
"""

import contextlib
import functools
from types import FunctionType, SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq import tasks
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_alma import interrupt
from fairseq_alma.task import AlmaLMTask
from fairseq_alma.training import late, weight_average
from tests.fairseq_alma.shared import config_of, load

DTYPES = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16",)}


@pytest.fixture(autouse=True)
def fresh_metrics():
    """fairseq's meters belong to the process."""
    metrics.reset()
    yield
    metrics.reset()


@pytest.fixture
def make_trainer(stream, tiny, tmp_path):
    """`make_trainer(*flags)`: fairseq's trainer, and the batches of the stream."""

    def run(*flags, device=("--cpu",)) -> tuple[Trainer, list]:
        cfg = config_of(stream, *tiny, *device, "--save-dir", tmp_path, *flags)
        torch.manual_seed(1)
        task = tasks.setup_task(cfg.task)
        model = task.build_model(cfg.model)
        trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
        iterator = trainer.get_train_iterator(1)
        weight_average.begin(trainer, None)
        return trainer, list(iterator.next_epoch_itr(shuffle=False))

    return run


@pytest.fixture
def poison(monkeypatch):
    """`poison(trainer, update, times)`: a gradient of this update, from 0, is nan."""

    def run(trainer: Trainer, update: int, times: int) -> None:
        original = trainer.task.train_step
        remaining = [times]

        def train_step(sample, model, *args, **kwargs):
            output = original(sample, model, *args, **kwargs)
            if remaining[0] and trainer.get_num_updates() == update:
                remaining[0] -= 1
                next(model.parameters()).grad[0, 0] = torch.nan
            return output

        monkeypatch.setattr(trainer.task, "train_step", train_step)

    return run


def step(trainer: Trainer, batch):
    """An update as fairseq_cli.train makes it."""
    with metrics.aggregate("train"), metrics.aggregate("train_inner"):
        return trainer.train_step([batch])


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """All that an update changes: weights, moments, step counts and averages."""
    tensors = [param.detach().clone() for param in trainer.get_model().parameters()]
    optimizer = trainer.optimizer.optimizer
    for group in optimizer.param_groups:
        for param in group["params"]:
            tensors.append(param.detach().clone())
            for value in optimizer.state[param].values():
                tensors.append(torch.as_tensor(value).clone())
    if trainer._ema is not None:
        tensors += [average.clone() for average in trainer._ema.get_model().parameters()]
        tensors.append(torch.tensor(trainer._ema.updates))
    return tensors


def assert_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def meters_of_training() -> dict[str, dict[str, torch.Tensor]]:
    """The numbers of each meter but for those of time."""
    numbers = {}
    for _, name, _, state in metrics.get_meters("train").state_dict():
        if name not in ("ups", "wps", "train_wall"):
            numbers[name] = {key: torch.as_tensor(state[key]) for key in state.keys() - {"round"}}
    return numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("average", [(), ("--store-ema", "--ema-start-update", "2")])
def test_updates_and_meters_equal_fairseqs(dtype, average, make_trainer, monkeypatch):
    results = []
    for is_late in (True, False):
        metrics.reset()
        trainer, batches = make_trainer("--clip-norm", "0.5", *DTYPES[dtype], *average)
        if not is_late:
            monkeypatch.setattr(late, "of", lambda trainer: None)
        for batch in batches[:7]:  # --log-interval is 5
            step(trainer, batch)
        late.settle(trainer)
        results.append((state_of(trainer), meters_of_training(), trainer.task.train_tokens))
    assert_equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][2] == results[1][2] > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("average", [(), ("--store-ema",)])
@pytest.mark.parametrize("reader", ["the next update", "a validation", "a checkpoint"])
def test_nan_leaves_all_as_it_was_and_ends_the_training(
    dtype, average, reader, make_trainer, poison, tmp_path
):
    trainer, batches = make_trainer(*DTYPES[dtype], *average)
    for batch in batches[:2]:
        step(trainer, batch)
    late.settle(trainer)
    before = state_of(trainer)
    poison(trainer, 2, times=9)
    assert step(trainer, batches[2]) is not None  # nobody has looked yet
    readers = {
        "the next update": lambda: step(trainer, batches[3]),
        "a validation": lambda: trainer.begin_valid_epoch(1),
        "a checkpoint": trainer.consolidate_optimizer,
    }
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        readers[reader]()
    assert_equal(state_of(trainer), before)
    assert trainer.get_num_updates() == 2
    crash = load(tmp_path / "crash.pt")  # as fairseq's, from before the update
    assert crash["optimizer_history"][-1]["num_updates"] == 2
    for name, weight in trainer.get_model().state_dict().items():
        assert torch.equal(crash["model"][name], weight), name
    assert {state["step"] for state in crash["last_optimizer_state"]["state"].values()} == {2}


def test_nan_at_the_log_interval_ends_the_training_there(make_trainer, poison):
    trainer, batches = make_trainer("--log-interval", "3")
    poison(trainer, 2, times=9)
    for batch in batches[:2]:
        step(trainer, batch)
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf"):
        step(trainer, batches[2])


def test_the_last_update_is_read_before_the_epoch_is_logged(make_trainer, monkeypatch):
    """Also with --no-save."""
    trainer, batches = make_trainer()
    for batch in batches[:2]:
        step(trainer, batch)
    functions = {
        "validate_and_save": lambda *args: ([None], True),
        "should_stop_early": lambda: None,
    }
    main = FunctionType((lambda: None).__code__, functions)
    monkeypatch.setattr(AlmaLMTask, "early_stop", {})
    interrupt.watch(main)
    epoch = SimpleNamespace(epoch=1)
    functions["validate_and_save"](trainer.cfg, trainer, trainer.task, epoch, [], False)
    assert trainer.late.unread is None
    assert metrics.get_meters("train")["gnorm"].count == 2


@pytest.mark.parametrize("update", [2, 4])  # in the middle, and at the log interval
def test_an_update_that_is_finite_when_repeated_changes_nothing(update, make_trainer, poison):
    """A GPU may add up in another order the second time."""
    results = []
    for times in (0, 1):
        metrics.reset()
        trainer, batches = make_trainer("--store-ema")
        poison(trainer, update, times)
        for batch in batches[:7]:
            step(trainer, batch)
        late.settle(trainer)
        results.append((state_of(trainer), meters_of_training()))
    assert_equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("norms", "flag"),
    [([2.0, 2.0], 0), ([2.0, 2.1], 1), ([2.0, torch.nan], 1), ([torch.inf, torch.inf], 1)],
)
def test_norms_that_differ_between_processes_set_the_flag(norms, flag, make_trainer, monkeypatch):
    trainer, batches = make_trainer()
    step(trainer, batches[0])

    def all_reduce(tensor, group):
        tensor.copy_(torch.tensor(norms))

    monkeypatch.setattr(distributed_utils, "all_reduce", all_reduce)
    trainer._grad_norm_buf = torch.zeros(2, dtype=torch.double)
    trainer.late.begin()
    assert trainer.late.optimizer.found_inf == flag


def test_a_copy_has_the_shapes_types_and_values(monkeypatch):
    """Its tensors are joined by type on the way; here without a GPU."""
    empty = torch.empty
    event = mock.Mock()
    monkeypatch.setattr(late, "_is_on_device", lambda tensor: tensor is not on_host)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kw: empty(*args, **kw))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    on_host = torch.tensor(0.3)
    tensors = [
        torch.tensor(0.1),
        on_host,
        torch.tensor(2**53 + 1),
        torch.arange(6.0).view(2, 3),
        torch.arange(3),
        torch.zeros(0),
        torch.tensor(0.1, dtype=torch.double, requires_grad=True),
    ]
    copy = late.HostCopy(tensors)
    assert sum(joined.numel() for joined in copy._joined.values()) == 1 + 1 + 6 + 3 + 0 + 1
    event.record.assert_called_once_with()
    event.synchronize.assert_not_called()
    torch.testing.assert_close(copy.read(), [t.detach() for t in tensors], rtol=0, atol=0)
    event.synchronize.assert_called_once_with()


class BlockingCopies(TorchDispatchMode):
    """Raises if the host waits for a copy to the device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten._to_copy.default and args[0].is_cpu and output.is_meta:
            assert kwargs.get("non_blocking"), "the host waits for a copy to the device"
        return output


class OnHost(late.HostCopy):
    """Copies from the meta device, which has no values, as zeros."""

    reads = 0

    def __init__(self, tensors):
        self._event = None
        self._tensors = [torch.zeros_like(tensor, device="cpu") for tensor in tensors]

    def read(self):
        OnHost.reads += 1
        return super().read()


@pytest.fixture
def on_meta(make_trainer, benchmark, monkeypatch):
    """`on_meta(*flags)`: updates on the meta device, where a value that is read raises."""
    memory = benchmark("training_memory")
    monkeypatch.setattr(late, "HostCopy", OnHost)
    monkeypatch.setattr(OnHost, "reads", 0)

    @contextlib.contextmanager
    def run(*flags):
        trainer, (batch, *_) = make_trainer("--log-interval", "4", *flags)
        trainer._model.to("meta")
        trainer.device = torch.device("meta")
        if trainer._ema is not None:
            trainer._ema.model.to("meta")
        trainer._optimizer = None
        batch = dict(batch, target=batch["target"].to("meta"))
        batch["net_input"] = {key: value.to("meta") for key, value in batch["net_input"].items()}
        with metrics.aggregate("train"), metrics.aggregate("train_inner"):
            metrics.log_speed("ups", 0.0)  # the first update of a process logs at once
        width = trainer.cfg.model.decoder_embed_dim
        longest = torch.zeros(64, 1, width, device="meta")
        trainer.get_model().decoder.buffered_future_mask(longest)  # copied once
        with memory.like_a_gpu(), BlockingCopies():
            yield functools.partial(step, trainer, batch), trainer

    return run


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("average", [(), ("--store-ema",)])
def test_an_update_never_waits_for_the_gpu(dtype, average, on_meta):
    with on_meta(*DTYPES[dtype], *average) as (update, _):
        for reads in (0, 1, 2):  # of the flag of the update before
            update()
            assert OnHost.reads == reads
        update()  # --log-interval
        assert OnHost.reads == 3 + 1 + 4


def test_an_update_of_several_processes_never_waits_for_the_gpu(on_meta, monkeypatch):
    """For the tokens of all, their norms and their signals neither."""
    with on_meta() as (update, trainer):
        monkeypatch.setattr(Trainer, "data_parallel_world_size", 2)
        monkeypatch.setattr(Trainer, "use_distributed_wrapper", False)
        monkeypatch.setattr(distributed_utils, "all_reduce", lambda *args, **kwargs: None)
        monkeypatch.setattr(distributed_utils, "get_global_group", lambda: None)
        monkeypatch.setattr(distributed_utils, "get_data_parallel_group", lambda: None)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(interrupt, "_answers", [])
        trainer._grad_norm_buf = torch.zeros(2, dtype=torch.double, device="meta")
        for reads in (0, 2, 4):
            update()
            assert not interrupt._any_process_received(trainer.device)
            assert OnHost.reads == reads


def test_a_sample_size_of_no_tokens_is_1():
    size = torch.tensor(0.0, dtype=torch.double)
    _, (total,) = late.aggregate_logging_outputs(
        lambda trainer, outputs, size: (outputs, (size,)), SimpleNamespace(late=1), [], size
    )
    assert (3 / (total or 7.0)).tolist() == 3
    assert type(3 / total) is torch.Tensor


def test_a_wait_for_the_norm_is_seen(on_meta, monkeypatch):
    monkeypatch.setattr(late, "of", lambda trainer: None)
    with on_meta() as (update, _), pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        update()


def test_a_loss_scale_takes_one_wait(on_meta, monkeypatch):
    """In the optimizer, which reads the norm."""
    waits = []

    def cpu(tensor):
        waits.append(tensor)
        return torch.zeros_like(tensor, device="cpu")

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with on_meta("--fp16") as (update, _):
        update()
        assert [tensor.is_meta for tensor in waits] == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_on_a_gpu_never_waits(dtype, make_trainer):
    trainer, batches = make_trainer("--store-ema", *DTYPES[dtype], device=())
    for batch in batches[:5]:  # --log-interval
        step(trainer, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[5:9]:
            step(trainer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    late.settle(trainer)
    assert metrics.get_meters("train")["gnorm"].count == 9

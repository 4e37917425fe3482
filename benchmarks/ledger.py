"""Operations, bytes and FLOPs of one whole update, counted on the meta device.

    python -m benchmarks ledger --changes                     # base, 8 experts, bf16, 32,768 tokens
    python -m benchmarks ledger --arch switch_gmoe_large --experts 12 --flags=--fp16

The update is fairseq's `Trainer.train_step` with this repository's model, criterion and optimizer:
forward and backward pass, gradients copied, their norm, clipping, Adam, statistics. Tensors have
shapes and no values, so any size takes seconds on any machine.

An operation is a call of an ATen operator that would start kernels on a GPU: views and empty
tensors are free, a `_foreach_` operator is one. Bytes are what it reads and writes: in place both,
of a look-up the rows that it looks up. A kernel that passes over its input twice still counts once.
A wait is a number that the host reads. `before` puts the code of `benchmarks.gpu.before` in place.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from alma.errors import Parser, UserError
from alma.tables import as_text
from benchmarks.gpu import before
from benchmarks.training_memory import dictionary, like_a_gpu
from fairseq_alma.training import weight_average

SPECIALS = 4
"""Tokens that fairseq's dictionary adds."""
LENGTH = 512
KINDS = (
    *("matmul", "attention", "loss", "gelu", "layer norm", "dispatch", "optimizer", "statistics"),
    *("other",),
)
"""Rows of the table. Matrix products are `matmul` wherever they are."""
BY_OPERATOR = {
    "mm": "matmul",
    "addmm": "matmul",
    "addmm_": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "gelu": "gelu",
    "gelu_backward": "gelu",
    "native_layer_norm": "layer norm",
    "native_layer_norm_backward": "layer norm",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_efficient_attention_backward": "attention",
}
BY_FILE = {
    "fairseq/modules/gelu.py": "gelu",
    "benchmarks/gpu/before/loss.py": "loss",
    "benchmarks/gpu/before/dispatch.py": "dispatch",
    "benchmarks/gpu/before/attention.py": "other",
    "fairseq_alma/moe/metrics.py": "statistics",
    "fairseq_alma/moe/": "dispatch",
    "fairseq_alma/training/loss": "loss",
    "fairseq/criterions/": "loss",
    "fairseq_alma/training/late": "statistics",
    "fairseq_alma/training/": "optimizer",
    "fairseq_alma/switch_lm.py": "other",
    "fairseq/optim/": "optimizer",
    "fairseq/modules/": "other",
    "fairseq/models/transformer/": "other",
    "fairseq/logging/": "statistics",
    "fairseq/trainer.py": "other",
}
"""Kind by the innermost frame of the call whose file has one of these parts."""
WRITE_ONLY = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
"""Operators in place that do not read what they overwrite."""
LOOK_UPS = ("embedding", "index_select", "gather", "index", "nll_loss_forward")
"""Operators that read as much of their first tensor as they write."""
NOT_READ = {"nll_loss_backward": 1}
"""Place of an argument of which only the shape counts, by operator."""
SCATTERS = ("scatter_", "scatter_add_", "index_add_", "index_fill_", "index_put_")
"""Operators that read and write as much of their first tensor as the others have."""
NO_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"),
    *("detach_", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"),
)


@dataclass
class Sum:
    """Of a kind, or of an operator within one."""

    operations: int = 0
    bytes: int = 0
    flops: int = 0

    def add(self, bytes_moved: int, flops: int) -> None:
        """Count an operation."""
        self.operations += 1
        self.bytes += bytes_moved
        self.flops += flops


@dataclass
class Count:
    """Of an update."""

    by_kind: dict[str, Sum] = field(default_factory=lambda: {kind: Sum() for kind in KINDS})
    by_operator: dict[tuple[str, str], Sum] = field(default_factory=lambda: defaultdict(Sum))
    waits: int = 0

    def total(self, name: str) -> int:
        """The sum of a field over kinds."""
        return sum(getattr(part, name) for part in self.by_kind.values())


class Ledger(TorchDispatchMode):
    """Counts operations on the meta device, and gives the numbers that an update reads there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()
        self.is_building = True
        self._last_operator = ""
        self._kind_of_node: dict[int, str] = {}

    # Norms are finite (`isfinite` ends with `mul` or `all`): they are not equal to infinity, nor
    # unequal to themselves. All other numbers that the host reads are 1.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense" and tensors[0].is_meta:
            self.count.waits += 1
            return self._last_operator not in ("eq", "ne")
        if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            return self._to_host(func, args, kwargs)
        kwargs.pop("pin_memory", None)  # needs CUDA
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            self.add("statistics", "copy to the host", 2 * bytes_of(args[1]))
            return args[0].zero_()  # no flag is set
        self._last_operator = name
        kind = self._kind(name)
        output = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        on_device = any(tensor.is_meta for tensor in (*tensors, *outputs))
        if on_device and not func.is_view and name not in NO_KERNEL:
            flops = 0
            if func.overloadpacket in flop_registry:
                flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=output)
            self.add(kind, name, bytes_moved(func, name, args, kwargs, outputs), flops)
        return output

    def add(self, kind: str, name: str, moved: int, flops: int = 0) -> None:
        """Count an operation; a kernel that PyTorch does not know counts itself so."""
        self.count.by_kind[kind].add(moved, flops)
        self.count.by_operator[kind, name].add(moved, flops)

    def _to_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """A copy for the host. What a GPU would keep stays where it is: weights and norms."""
        if not args[0].is_meta:
            return func(*args, **kwargs)
        if self.is_building or args[0].dim() == 0:
            return func(*args, **kwargs | {"device": torch.device("meta")})
        self.count.waits += 1
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def _kind(self, name: str) -> str:
        """By the operator, else by the code that calls it or, in the backward pass, by the code
        that called the operation of which this is the gradient."""
        node = torch._C._current_autograd_node()
        kind = kind_of_code(sys._getframe(2), within_backward=node is not None)
        if node is not None:
            kind = kind or self._kind_of_node.get(node._sequence_nr(), "other")
        else:
            # A node of autograd takes its number just before its operation starts.
            self._kind_of_node.setdefault(
                torch._C._autograd._get_sequence_nr() - 1, kind or "other"
            )
        return BY_OPERATOR.get(name, kind or "other")


def kind_of_code(frame: FrameType | None, within_backward: bool) -> str | None:
    """By the innermost frame of BY_FILE; within the backward pass only frames of custom gradients
    count."""
    while frame is not None:
        code = frame.f_code
        if within_backward and code.co_filename.endswith("torch/autograd/graph.py"):
            return None
        if "clip_grad_norm" in code.co_name:
            return "optimizer"
        for part, kind in BY_FILE.items():
            if part in code.co_filename:
                return kind
        frame = frame.f_back
    return None


def bytes_moved(func: Any, name: str, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    arguments = func._schema.arguments
    values = [*args]
    values += [kwargs.get(argument.name) for argument in arguments[len(args) :]]
    read = 0
    written = 0
    changed = set()
    for place, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        if NOT_READ.get(name) == place:
            continue
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        size = sum(map(bytes_of, tensors))
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += size
            changed |= {id(tensor) for tensor in tensors}
            if not argument.is_out and name not in WRITE_ONLY:
                read += size
        else:
            read += size
    new = sum(bytes_of(tensor) for tensor in outputs if id(tensor) not in changed)
    first = args[0] if args else None
    if name in LOOK_UPS and isinstance(first, Tensor):
        return read - bytes_of(first) + 2 * new
    if name in SCATTERS and isinstance(first, Tensor):
        scattered = read - bytes_of(first)
        return min(3 * scattered, read + written)
    return read + written + new


def bytes_of(tensor: Tensor) -> int:
    """Of the elements of a tensor, an expanded dimension once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not length:
            size *= length
    return size


def words_of(folder: str, args: Any) -> list[str]:
    """The command line of fairseq-train whose update is counted."""
    words = f"{folder} --task alma_lm --arch {args.arch} --moe-expert-count {args.experts}"
    words += f" --tokens-per-sample {LENGTH} --batch-size {args.tokens // LENGTH}"
    words += " --optimizer adam --lr 2e-4 --clip-norm 1 --max-update 10 --no-save --cpu"
    return [*words.split(), *args.flags.split()]


def trainer_of(words: Sequence[str]) -> Trainer:
    """fairseq's trainer on the meta device, inside a `Ledger`."""
    parser = options.get_training_parser(default_task="alma_lm")
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(words)))
    task = tasks.setup_task(cfg.task)
    with torch.device("meta"):
        model = task.build_model(cfg.model)
        criterion = task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    trainer.device = torch.device("meta")
    weight_average.begin(trainer, None)  # as a training that does not resume
    trainer.save_checkpoint = lambda *_: None  # of an update that has failed
    return trainer


def batch(sequences: int) -> dict[str, Any]:
    """A batch of fairseq's task, without padding."""
    tokens = torch.empty(sequences, LENGTH, dtype=torch.int64, device="meta")
    return {
        "id": torch.arange(sequences),
        "nsentences": sequences,
        "ntokens": sequences * LENGTH,
        "padded": False,
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((sequences,), LENGTH)},
        "target": tokens,
    }


@contextlib.contextmanager
def like_an_update_on_a_gpu(ledger: Ledger) -> Iterator[None]:
    """A GPU's kernels on the meta device; a kernel that is not PyTorch's counts itself."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(like_a_gpu())
        stack.enter_context(mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0))
        stack.enter_context(mock.patch.object(torch.cuda, "Event"))
        yield


def count(args: Any, without: Sequence[str] = ()) -> Count:
    """The second update, as the first makes the optimizer's state; `without`: changes of
    `benchmarks.gpu.before` that are taken back."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(dictionary(args.vocabulary - SPECIALS))
        ledger = Ledger()
        stack.enter_context(before.without(without))
        stack.enter_context(like_an_update_on_a_gpu(ledger))
        stack.enter_context(ledger)
        metrics.reset()
        stack.callback(metrics.reset)
        trainer = trainer_of(words_of(folder, args))
        ledger.is_building = False
        batches = trainer.cfg.optimization.update_freq[0]
        with metrics.aggregate("train_inner"):
            for _ in range(2):
                ledger.count = Count()
                trainer.train_step([batch(args.tokens // LENGTH) for _ in range(batches)])
        return ledger.count


def table(counts: dict[str, Count]) -> list[list[str]]:
    """A row for each kind, and columns for each count."""
    header = ["kind"]
    for name in counts:
        header += [f"operations {name}", f"GB {name}"]
    rows = [[*header, "TFLOP"]]
    last = list(counts.values())[-1]
    for kind in KINDS:
        row = [kind]
        for counted in counts.values():
            part = counted.by_kind[kind]
            row += [str(part.operations), f"{part.bytes / 1e9:.2f}"]
        rows.append([*row, f"{last.by_kind[kind].flops / 1e12:.2f}"])
    total = ["sum"]
    for counted in counts.values():
        total += [str(counted.total("operations")), f"{counted.total('bytes') / 1e9:.1f}"]
    rows.append([*total, f"{last.total('flops') / 1e12:.2f}"])
    waits = ["waits"]
    for counted in counts.values():
        waits += [str(counted.waits), ""]
    return [*rows, [*waits, ""]]


def savings(args: Any, now: Count) -> list[list[str]]:
    """What each change saves: an update without it against one with all."""
    rows = [["change", "operations", "GB", "waits"]]
    for change in before.CHANGES:
        without = count(args, [change])
        operations = without.total("operations") - now.total("operations")
        gigabytes = (without.total("bytes") - now.total("bytes")) / 1e9
        rows.append([change, str(operations), f"{gigabytes:.1f}", str(without.waits - now.waits)])
    return rows


def longest(counted: Count, number: int) -> list[list[str]]:
    """The operators that move most bytes."""
    rows = [["kind", "operator", "operations", "GB"]]
    ordered = sorted(counted.by_operator.items(), key=lambda item: -item[1].bytes)
    for (kind, name), part in ordered[:number]:
        rows.append([kind, name, str(part.operations), f"{part.bytes / 1e9:.2f}"])
    return rows


def parser() -> Parser:
    """The command line."""
    command_line = Parser(prog="python -m benchmarks ledger", description=__doc__)
    add = command_line.add_argument
    add("--arch", default="switch_gmoe_base", help="as --arch of fairseq-train")
    add("--experts", type=int, default=8, help="experts of a Switch layer (default: 8)")
    add("--tokens", type=int, default=32_768, help="tokens of a batch (default: 32768)")
    add("--vocabulary", type=int, default=50_264, help="special tokens included (default: 50264)")
    add(
        "--flags",
        default="--bf16",
        help="of fairseq-train, as --flags='--fp16 --dropout 0' (default: --bf16)",
    )
    add("--changes", action="store_true", help="also what each change saves")
    add("--operators", type=int, default=0, metavar="N", help="list the N that move most bytes")
    return command_line


def main(words: list[str]) -> None:
    """`python -m benchmarks ledger`."""
    args = parser().parse_args(words)
    if args.tokens < LENGTH or args.tokens % LENGTH:
        raise UserError(f"--tokens {args.tokens}: give a multiple of {LENGTH}, a sequence's length")
    if args.vocabulary <= SPECIALS:
        raise UserError(f"--vocabulary {args.vocabulary}: give {SPECIALS + 1} or more")
    counts = {"before": count(args, before.CHANGES), "now": count(args)}
    print(f"{args.arch}, {args.experts} experts, {args.flags}, batches of {args.tokens:,} tokens")
    print(as_text(table(counts)))
    if args.changes:
        print("\nsaved by each change")
        print(as_text(savings(args, counts["now"])))
    for name, counted in counts.items():
        if args.operators:
            print(f"\n{name}")
            print(as_text(longest(counted, args.operators)))

"""The fairseq task `alma_lm`: train on one stage of a mega-batch stream (paper, section 3,
Algorithm 1)."""

import functools
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from fairseq.data import MonolingualDataset
from fairseq.data.encoders.gpt2_bpe import DEFAULT_ENCODER_JSON
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from numpy.typing import NDArray

from alma.errors import UserError
from alma.processes import peak_memory
from alma.stages import Stage, check_share, stages
from alma.stream import Part, Stream, is_stream, read_index
from fairseq_alma import initial
from fairseq_alma.data import lm_dataset, preprocessed, token_blocks
from fairseq_alma.moe.layer import divide_experts, routings_of
from fairseq_alma.moe.metrics import layer_stats, log_layers, token_nll
from fairseq_alma.switch_lm import expect_padding
from fairseq_alma.task_options import AlmaLMConfig
from fairseq_alma.training.loss import ChunkedCrossEntropyCriterion

logger = logging.getLogger(__name__)

_KEPT = (
    "train_tokens",
    "valid_tokens",
    "growth_tokens",
    "seconds",
    "peak_memory",
    "earlier_updates",
    "first_update",
    "average_from",
)
"""Measurements of this stage that checkpoints keep."""


@register_task("alma_lm", dataclass=AlmaLMConfig)
class AlmaLMTask(LanguageModelingTask):
    """Language modelling on a stage of a mega-batch stream.

    DATA is a stream directory (see alma.stream) or the output directory of fairseq-preprocess;
    several of the latter, joined by ':', are shards of one corpus. The split `train` has the
    mega-batches of the stage.
    """

    early_stop: ClassVar[dict[str, Any]] = {}
    """fairseq's counters of --patience, attributes of its function should_stop_early.

    `interrupt.watch` sets this in a process that trains; empty in others.
    """

    def __init__(self, args, dictionary, output_dictionary=None, targets=None):
        super().__init__(args, dictionary, output_dictionary, targets)
        self.stream = Stream.load(args.data) if is_stream(args.data) else None
        if self.stream:
            self._stage()  # raise before fairseq builds and prints a model
        # Counts of this stage, including the interrupted processes that this one resumes.
        self.train_tokens = 0
        self.valid_tokens = 0
        self.growth_tokens = 0
        self.peak_memory = 0
        self.earlier_updates = 0  # of earlier stages, unless the update count includes them
        self.first_update = 0  # update count at the start of this stage
        self.average_from = 0  # update count at the start of the weight average
        self.seconds = 0.0  # training time of the interrupted processes that this one resumes
        self.started = time.monotonic()
        self.tf32: bool | None = None  # whether products of fp32 are TF32, see `training.tf32`
        self.note = ""  # a hint about how the fairseq-preprocess directory was cut
        check_share(args.replay_share, args.replay)
        if args.replay_share and not args.stage:
            raise UserError(
                "--replay-share: stage 0 has no earlier mega-batches; leave it out there"
            )
        # For each split: the files' prefixes and the item numbers to use (None: all).
        self.sources: dict[str, tuple[list[str], NDArray[np.int64] | None]] = {}

    @classmethod
    def setup_dictionary(cls, args, **kwargs):
        """As fairseq's. UserError: data or dict.txt missing, or dict.txt not a dictionary."""
        first = Path(args.data.split(":")[0])
        if not first.is_dir():
            raise UserError(f"{first}: no such directory; make a stream with `alma data`")
        if not (first / "dict.txt").is_file():
            question = "is this a stream or fairseq-preprocess directory?"
            raise UserError(f"{first}: dict.txt is missing; {question}")
        try:
            return super().setup_dictionary(args, **kwargs)
        except Exception as error:  # fairseq raises Exception for a wrong encoding
            problem = f"is not a dictionary: {error}; make the data again"
            raise UserError(f"{first}/dict.txt {problem}") from error

    def build_model(self, args, from_checkpoint: bool = False):
        """As fairseq's; with --moe-expert-parallel, the trained model has the local experts only.

        UserError: no such stage, experts not divisible by the number of processes.
        """
        is_later_stage = self.args.stage or self.args.waiting_time != 1
        if self.is_cut() and is_later_stage and not from_checkpoint:
            self._stage()  # raise before the model is built
        model = super().build_model(args, from_checkpoint)
        if self.args.init and not from_checkpoint:
            initial.load(model, self.args.init)
        unused_ids = initial.unused(self.args.end_token)
        if unused_ids:
            initial.exclude(model.decoder.output_projection, unused_ids)
        if getattr(args, "moe_expert_parallel", False) and not from_checkpoint:
            divide_experts(model, args.moe_expert_count)
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Load `train` (the mega-batches of --stage), `valid` or `test` as blocks of tokens.

        A block has --tokens-per-sample tokens. UserError: no such stage or split; files missing,
        truncated, changed or empty.
        """
        directories = self.args.data.split(":")
        if self.stream:
            self.sources[split] = self._files(self.stream, self._parts(self.stream, split)), None
        elif split == "train":
            prefixes = preprocessed.checked([f"{directory}/train" for directory in directories])
            self.sources[split] = prefixes, self._train_items()
        else:
            self.sources[split] = preprocessed.checked([f"{directories[0]}/{split}"]), None
        self.datasets[split] = self._blocks(split, self.args.tokens_per_sample)

    def _parts(self, stream: Stream, split: str) -> list[Part]:
        """The parts of the stream in a split. UserError: no such stage or split."""
        if split == "train":
            stage = self._stage()
            logger.info(f"stage {stage.index}: mega-batches {_joined(stage.train_on)}")
            return [stream.megabatches[number - 1] for number in stage.train_on]
        if split == "valid" and stream.ordered:
            stage = self._stage()
            return list(stream.held_out_valid[stage.first - 1 : stage.last])
        parts = {part.name: part for part in (stream.valid, stream.test, *stream.held_out)}
        if split not in parts:
            raise UserError(f"{split}: this stream has the splits train, {', '.join(parts)}")
        return [parts[split]]

    def _train_items(self) -> NDArray[np.int64] | None:
        """The items of the stage's mega-batches in a fairseq-preprocess directory; None: all.

        UserError: the directory is one mega-batch, and the stage needs several.
        """
        if self.is_cut():
            stage = self._stage()
            numbers = _joined(stage.train_on)
            logger.info(f"{len(self.megabatches)} mega-batches; stage {stage.index}: {numbers}")
            return np.concatenate([self.megabatches[number - 1] for number in stage.train_on])
        if self.args.stage or self.args.waiting_time != 1:
            problem = f"{self.args.data} is not a stream (no stream.json), so it is one mega-batch"
            flags = "--megabatch-words N or --megabatch-tokens N to cut it"
            raise UserError(f"{problem}: give {flags}, or GPT-2's --gpt2-encoder-json")
        return None

    def _files(self, stream: Stream, parts: list[Part]) -> list[str]:
        """The prefixes of the files of the stream's `parts`, checked."""
        if distributed_utils.get_global_rank() == 0:
            stream.check(parts)
        return preprocessed.checked([stream.path(part) for part in parts])

    def _stage(self, replay_from: str | None = None) -> Stage:
        """The stage --stage. UserError: no such stage."""
        megabatches = len(self.stream.megabatches if self.stream else self.megabatches)
        schedule = stages(megabatches, self.args.waiting_time, self.args.replay, replay_from)
        if not 0 <= self.args.stage < len(schedule):
            data = f"{megabatches} mega-batches with --waiting-time {self.args.waiting_time}"
            problem = f"{data} have stages 0 to {len(schedule) - 1}"
            raise UserError(f"--stage {self.args.stage}: {problem}")
        return schedule[self.args.stage]

    def is_cut(self) -> bool:
        """Whether to cut DATA, a fairseq-preprocess directory, into mega-batches."""
        return not self.stream and bool(self.megabatch_words or self.args.megabatch_tokens)

    @functools.cached_property
    def encoder_json(self) -> str | None:
        """GPT-2's encoder.json: --gpt2-encoder-json, else the one beside dict.txt."""
        if self.args.gpt2_encoder_json not in ("", DEFAULT_ENCODER_JSON):
            return self.args.gpt2_encoder_json
        beside = Path(self.args.data.split(":")[0], "encoder.json")
        return str(beside) if beside.is_file() else None

    @functools.cached_property
    def megabatch_words(self) -> int:
        """--megabatch-words; by default the paper's size for GPT-2's ids with an encoder.json.

        0: the size is not in words.
        """
        if self.args.megabatch_words or self.args.megabatch_tokens or not self.encoder_json:
            return self.args.megabatch_words
        return preprocessed.MEGABATCH_WORDS if preprocessed.has_ids(self.dictionary) else 0

    @functools.cached_property
    def megabatches(self) -> list[NDArray[np.int64]]:
        """Numbers of the items in each mega-batch of a fairseq-preprocess directory."""
        target = self.megabatch_words
        seed = self.args.megabatch_seed
        prefixes, sizes = self._items()
        if not target:
            return preprocessed.assign(sizes, sizes, self.args.megabatch_tokens, seed)
        words = preprocessed.count_words(prefixes, self.dictionary, self.encoder_json)
        total = int(words.sum())
        if not self.args.megabatch_words and total < target:
            self.note = f"{total:,} words are one mega-batch: --megabatch-words N cuts smaller ones"
            logger.info(self.note)
            target = max(1, total)
        return preprocessed.assign(sizes, words, target, seed)

    def megabatch_tokens(self) -> list[int]:
        """Tokens of each mega-batch of a fairseq-preprocess directory."""
        _, sizes = self._items()
        return [int(sizes[items].sum()) for items in self.megabatches]

    def _items(self) -> tuple[list[str], NDArray[np.int64]]:
        """Prefixes of the files of a fairseq-preprocess directory, and tokens of each of their
        items."""
        prefixes = preprocessed.checked([f"{folder}/train" for folder in self.args.data.split(":")])
        return prefixes, np.concatenate([read_index(f"{prefix}.idx")[0] for prefix in prefixes])

    def _blocks(self, split: str, length: int) -> MonolingualDataset:
        """A split as blocks of `length` tokens, with those of --replay-share in `train`."""
        prefixes, items = self.sources[split]
        tokens = token_blocks.Tokens(prefixes, items)
        if not len(tokens):
            raise UserError(f"{self.args.data}: {split} is empty")
        with_replay = None
        if split == "train" and self.args.replay_share:
            with_replay = self._with_replay
        return lm_dataset.build(self, tokens, length, with_replay)

    def _with_replay(self, blocks: token_blocks.TokenBlocks) -> token_blocks.ReplayBlocks:
        """The stage's `blocks`, and those of earlier mega-batches for --replay-share."""
        share = self.args.replay_share
        numbers = self._stage(self.args.replay_from).earlier
        logger.info(f"replay of mega-batches {_joined(numbers)}: {share:g} of all tokens")
        if self.stream:
            parts = [self.stream.megabatches[number - 1] for number in numbers]
            earlier = [token_blocks.Tokens([prefix]) for prefix in self._files(self.stream, parts)]
        else:
            prefixes, _ = self.sources["train"]
            cut = (self.megabatches[number - 1] for number in numbers)
            earlier = [token_blocks.Tokens(prefixes, items) for items in cut]
        seed = self.args.seed + self.args.stage
        return token_blocks.ReplayBlocks(blocks, earlier, share, seed)

    def eval_lm_dataloader(self, dataset, max_positions=None, **kwargs):
        """As fairseq's, with blocks cut to the model's positions; fairseq drops longer blocks."""
        if max_positions and max_positions < self.args.tokens_per_sample:
            split = next(name for name, loaded in self.datasets.items() if loaded is dataset)
            dataset = self._blocks(split, max_positions - kwargs.get("context_window", 0))
        return super().eval_lm_dataloader(dataset, max_positions=max_positions, **kwargs)

    def get_batch_iterator(self, dataset, *args, **kwargs):
        """As fairseq's, with two changes.

        Evaluation keeps the last batch. fairseq drops one whose size is no multiple of
        --required-batch-size-multiple (8): harmless in training, where other blocks are dropped in
        each epoch, but evaluation would miss the same blocks every time.

        Workers are not persistent. Persistent ones form a reference cycle with their iterator, and
        the garbage collector waits 5 s for each because it closes their queue first.
        """
        multiple = kwargs.get("required_batch_size_multiple", 1)
        if dataset is not self.datasets.get("train") or len(dataset) < multiple:
            kwargs["required_batch_size_multiple"] = 1
        iterator = super().get_batch_iterator(dataset, *args, **kwargs)
        iterator.reuse_dataloader = False
        iterator.persistent_workers = False
        return iterator

    def can_reuse_epoch_itr(self, dataset) -> bool:
        """Never: epoch 2 would reuse the batches of epoch 1, but not after a resume within epoch
        2."""
        return False

    def has_sharded_data(self, split: str) -> bool:
        """Never: fairseq would train on one shard per epoch, not on all."""
        return False

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        """As fairseq's, plus the load-balancing loss, with any criterion.

        fairseq divides the summed loss by `sample_size`, so the load-balancing loss, a mean, is
        multiplied by it.
        """
        model.set_num_updates(update_num)
        with (
            torch.autograd.profiler.record_function("forward"),
            outputs_of(model, sample) as outputs,
        ):
            loss, sample_size, logging_output = criterion(model, sample)
            routings = routings_of(outputs[-1]) if outputs else {}
            outputs.clear()  # free the logits before backward
            balance = sum(routing.balance_loss for routing in routings.values())
            loss = loss + self.args.moe_gate_loss_wt * sample_size * balance
        if ignore_grad:
            loss = loss * 0
        with torch.autograd.profiler.record_function("backward"):
            optimizer.backward(loss)
        logging_output |= layer_stats(routings)
        if torch.cuda.is_available():
            self.peak_memory = max(self.peak_memory, torch.cuda.max_memory_allocated())
        return loss, sample_size, logging_output

    def valid_step(self, sample, model, criterion):
        """As fairseq's, plus the loss of each expert."""
        with outputs_of(model, sample) as outputs:
            loss, sample_size, logging_output = super().valid_step(sample, model, criterion)
        routings = routings_of(outputs[-1]) if outputs else {}
        if routings:
            if isinstance(criterion, ChunkedCrossEntropyCriterion):
                nll = criterion.nll  # the decoder returned features, not logits
            else:
                nll = token_nll(outputs[-1][0], sample["target"], self.dictionary.pad())
            logging_output |= layer_stats(routings, nll)
        return loss, sample_size, logging_output

    def reduce_metrics(self, logging_outputs, criterion) -> None:
        """As fairseq's, plus the metrics of the Switch layers, numbered as in the parameter
        names."""
        super().reduce_metrics(logging_outputs, criterion)
        tokens = int(sum(log.get("ntokens", 0) for log in logging_outputs))
        if criterion.training:
            self.train_tokens += tokens
        else:
            self.valid_tokens += tokens
        log_layers(logging_outputs)

    def get_checkpoint_dict(self) -> dict[str, Any]:
        """Measurements of this stage for the checkpoint; fairseq restores them only when it
        resumes."""
        if not torch.cuda.is_available():
            self.peak_memory = max(self.peak_memory, peak_memory())
        state = {name: getattr(self, name) for name in _KEPT} | {"stage": self.args.stage}
        state["early_stop"] = dict(self.early_stop)
        state["tf32"] = self.tf32
        state["seconds"] += time.monotonic() - self.started
        return {type(self).__name__: state}

    def set_checkpoint_dict(self, state: dict[str, Any]) -> None:
        """Restore the measurements."""
        for name in _KEPT:
            setattr(self, name, state[name])
        self.early_stop.update(state.get("early_stop", {}))


def _joined(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


@contextmanager
def outputs_of(model, sample: dict[str, Any]) -> Iterator[list[tuple]]:
    """Context manager: the yielded list collects the decoder's outputs, whatever criterion runs it.

    `sample` is the batch; if it says whether it is padded, the decoder needs no host sync.
    """
    while not hasattr(model, "decoder"):  # fairseq's distributed wrappers
        model = model.module
    outputs: list[tuple] = []
    expect_padding(model.decoder, sample.get("padded"))
    with model.decoder.register_forward_hook(lambda _, inputs, output: outputs.append(output)):
        yield outputs

"""The interface of ALMA to your own trainer; docs/trainers.md lists the fields of its two files.

`alma train STREAM --trainer COMMAND` writes stage.json and runs COMMAND with its path, for each
training and evaluation. COMMAND writes trained.json, and a training its checkpoint, into the folder
of stage.json.
"""

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from alma.errors import UserError, fail
from alma.evaluations import read_item_losses, write_item_losses
from alma.files import make_directory, write_json_atomic
from alma.schema import AMOUNT, COUNT, LARGEST, NATURAL, NUMBER, TEXT, parse_json, require
from alma.stream import EOS, INSIDE, document_losses
from alma.token_ids import TokenIds

if TYPE_CHECKING:
    import numpy as np

STAGE = "stage.json"
TRAINED = "trained.json"
PARTS = "parts"  # folder beside them: results of single parts, until trained.json has all
LOSS = "loss"
_TOLERANCE = 1e-4  # between the sum over documents and the loss of a part, which may be in fp32
_LOSS = Annotated[float, msgspec.Meta(ge=0, le=math.log(LARGEST))]


@dataclass(frozen=True)
class TextPart:
    """A mega-batch or an evaluation set of the stream, with its counts."""

    name: TEXT
    period: TEXT
    words: NATURAL
    bytes: NATURAL
    tokens: NATURAL
    files: tuple[TEXT, ...]
    documents: NATURAL = 0  # or images; 0: in a task of an earlier version of ALMA
    end_token: NATURAL | None = None
    """The id that ends a document in the ids of the model whose tokenizer the stream has."""

    def file(self, suffix: str) -> Path:
        """The path of the part's only file with this suffix.

        If there is none, or several, the program ends with one line and exit code 2.
        """
        names = [name for name in self.files if name.endswith(suffix)]
        if len(names) != 1:
            fail(f"{self.name}: {len(names)} files {suffix}, not 1")
        return Path(names[0])

    def read_tokens(self) -> "np.ndarray":
        """The token ids, (tokens,).

        If the stream has the tokenizer of a model (`alma data --tokenizer FOLDER`), they are the
        ids of that tokenizer, int64, and `end_token` ends a document. Else they are those of
        fairseq's .bin file, memory-mapped: id 2 ends a line, and an empty line (a lone 2) ends a
        document.
        """
        return self.map_tokens().read()

    def map_tokens(self) -> TokenIds:
        """The token ids of `read_tokens` in a memory map, to read a slice at a time."""
        return TokenIds(self.file(".bin"), self.file(".idx"), self.end_token)

    def document_losses(self, nll: "np.ndarray") -> "np.ndarray":
        """The rows that `StageTask.finish` takes as `documents`, float64 (documents, 2).

        nll: (tokens,), the loss in nats of each of `read_tokens`. UserError: of other tokens.
        """
        return document_losses(nll, self.file(".idx"), self.documents)

    def read_documents(self) -> Iterator[Any]:
        """The values of the lines of the .jsonl file."""
        with self.file(".jsonl").open("rb") as lines:
            yield from map(json.loads, lines)


@dataclass(frozen=True)
class Answer:
    """The contents of trained.json, COMMAND's answer.

    A training answers with its costs and checkpoint, an evaluation with `losses`: for each part
    (mean loss in nats per token, number of tokens).
    """

    parameters: COUNT
    losses: dict[TEXT, tuple[_LOSS, COUNT]] = field(default_factory=dict)
    documents: dict[TEXT, INSIDE] = field(default_factory=dict)
    """Files with the losses of single documents, by name of the part."""
    checkpoint: INSIDE | None = None
    updates: NATURAL = 0
    tokens: NATURAL = 0
    seconds: AMOUNT = 0.0
    flops: AMOUNT | None = None
    validation_flops: AMOUNT = 0.0
    eval_flops_per_example: AMOUNT | None = None
    peak_memory_bytes: NATURAL = 0


@dataclass(frozen=True)
class MetricAnswer(Answer):
    """An answer whose `losses` are values of another metric, of any sign."""

    losses: dict[TEXT, tuple[NUMBER, COUNT]] = field(default_factory=dict)


class PartResult(msgspec.Struct):
    """What `StageTask.save_part` writes."""

    files: tuple[TEXT, ...]  # of the part: another one may have the same name
    value: NUMBER
    count: COUNT  # of tokens, or of what the value is a mean of


@dataclass(frozen=True, kw_only=True)
class StageTask:
    """The contents of stage.json, ALMA's request to COMMAND: one training or one evaluation."""

    version: Literal[1] = 1
    action: Literal["train", "evaluate"]
    out: TEXT
    stream: TEXT
    dictionary: NATURAL
    learner: TEXT
    member: NATURAL = 0
    stage: NATURAL | None
    t: NATURAL
    megabatches: COUNT
    waiting_time: COUNT
    train: tuple[TextPart, ...] = ()
    earlier: tuple[TextPart, ...] = ()
    replay_share: AMOUNT = 0.0
    valid: tuple[TextPart, ...]
    evaluate: tuple[TextPart, ...] = ()
    checkpoint: TEXT | None = None
    members: tuple[TEXT, ...] = ()
    seeds: tuple[NATURAL, ...]
    budget: dict[Literal["updates", "tokens", "seconds"], COUNT] = field(default_factory=dict)
    metric: TEXT = LOSS
    """Of the values in `losses` of the answer; `alma matrix --metric` names another than the loss
    in nats."""

    @property
    def end_token(self) -> int:
        """The id that ends a line or a document in `TextPart.read_tokens`; texts start with it."""
        end_token = self.valid[0].end_token
        return EOS if end_token is None else end_token

    @classmethod
    def read(cls, path: str) -> "StageTask":
        """The task in a file; another file ends the program with one line and exit code 2."""
        try:
            return msgspec.convert(parse_json(Path(path).read_bytes()), cls)
        except (OSError, ValueError) as error:
            fail(f"{path}: no {STAGE} that this version of ALMA reads ({error})")

    def progress(self, updates: int, loss: float) -> None:
        """Print a line from which `alma train` and `alma status` show the progress."""
        stats = {
            "num_updates": updates,
            "loss": round(loss, 3),
            "ppl": round(math.exp(min(loss, 99)), 2),
        }
        print(f"alma | train_inner | {json.dumps(stats)}", flush=True)

    def save_part(self, name: str, value: float, count: int) -> None:
        """Write the result of a part at once, so that an evaluation that is killed keeps it.

        value: the mean loss in nats per token, or of the task's metric. count: of the tokens.
        `finish` still takes all parts.
        """
        (part,) = (part for part in self.evaluate if part.name == name)
        folder = Path(self.out, PARTS)
        make_directory(folder)
        record = {"files": part.files, "value": float(value), "count": int(count)}
        write_json_atomic(folder / f"{name}.json", record)

    def finish(
        self,
        losses: Mapping[str, tuple[float, int]] | None = None,
        documents: "Mapping[str, np.ndarray] | None" = None,
        **fields: Any,
    ) -> None:
        """Write trained.json atomically; call it last, after the checkpoint is written.

        `losses` are by name of the part; `fields` are other fields of `Answer`. documents: by name
        of the part, for each document its loss in nats, summed over its tokens, and the number of
        its tokens, (documents, 2), which are written to files. If a field is wrong, the program
        ends with one line and exit code 2.
        """
        record: dict[str, Any] = dict(fields)
        record["losses"] = {}
        for name, (loss, tokens) in (losses or {}).items():
            record["losses"][name] = (float(loss), int(tokens))
        try:
            if documents:
                record["documents"] = self._write_documents(documents)
            self.checked(record)
        except UserError as error:
            fail(str(error))
        write_json_atomic(Path(self.out, TRAINED), record)

    def _write_documents(self, documents: "Mapping[str, np.ndarray]") -> dict[str, str]:
        """Write the losses of single documents; the names of the files, by name of the part."""
        names = {part.name for part in self.evaluate}
        files = {}
        for name, losses in documents.items():
            if name not in names:
                raise UserError(f"documents of {name}, which is no part of this task")
            files[name] = f"{name}.documents.npy"
            write_item_losses(Path(self.out, files[name]), losses)
        return files

    def checked(self, record: Any) -> Answer:
        """The answer in `record`. UserError: a field is wrong, or does not answer this task."""
        try:
            require(record, {}, ["parameters"])
            kind = Answer if self.metric == LOSS else MetricAnswer
            answer = msgspec.convert(record, kind)
            unknown = sorted(record.keys() - {declared.name for declared in fields(Answer)})
            if unknown:
                raise ValueError(f"unknown fields {', '.join(unknown)}")
            lacking = [part.name for part in self.evaluate if part.name not in answer.losses]
            if lacking:
                raise ValueError(f"no loss of {', '.join(lacking)}")
            for part in self.evaluate:
                if part.name in answer.documents:
                    self._check_documents(part, answer)
            if self.action == "train" and not (answer.updates and answer.tokens):
                raise ValueError("a training without updates, or without tokens")
            if self.action == "train" and not Path(self.out, answer.checkpoint or "/none").exists():
                raise ValueError(f"checkpoint {answer.checkpoint}: no such file in the folder")
        except ValueError as error:
            raise UserError(
                f"{Path(self.out, TRAINED)}: {error}; correct the trainer and rerun"
            ) from None
        return answer

    def _check_documents(self, part: TextPart, answer: Answer) -> None:
        """ValueError: the losses of single documents of a part do not add up to its loss."""
        name = answer.documents[part.name]
        try:
            rows = read_item_losses(Path(self.out, name))
        except UserError:
            raise ValueError(f"{name}: not an array of losses and counts of documents") from None
        if rows is None:
            raise ValueError(f"{name}: no such file in the folder")
        if part.documents and len(rows) != part.documents:
            problem = f"{len(rows):,} documents, and {part.name} has {part.documents:,}"
            raise ValueError(f"{name}: {problem}")
        nll, tokens = answer.losses[part.name]
        nats, counted = rows.sum(0)
        if counted != tokens:
            raise ValueError(f"{name}: {counted:,.0f} tokens, and losses of {tokens:,}")
        if not math.isclose(nats, nll * tokens, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            problem = f"documents add up to {nats:,.3f} nats, and losses to {nll * tokens:,.3f}"
            raise ValueError(f"{name}: {problem}")


def stop_requests() -> Callable[[], bool]:
    """Return a function that says whether ALMA or SLURM has asked the process to stop since now.

    If so, save a checkpoint and exit with code 75; ALMA runs the same command again later.
    """
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: received.append(number))
    return lambda: bool(received)

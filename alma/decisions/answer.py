"""What `alma due` and `alma gate` answer: a line or a JSON object, and an exit code."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from typing import Literal, NoReturn

from alma.report.results import rounded

Word = Literal["yes", "no", "no evidence"]
EXIT_CODES: dict[Word, int] = {"yes": 0, "no": 1, "no evidence": 3}
"""Exit code 2 is bad input, as of all commands."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model of a run."""

    stage: int
    """Its stage, from 0."""
    megabatch: int
    """The newest mega-batch that it was trained on."""
    period: str | None
    """Of that mega-batch; None: the stream has no dates."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to a question; its fields are those of the JSON object."""

    question: Literal["due", "gate"]
    run: str
    answer: Word
    exit_code: int
    reason: str
    course: str | None
    """What to do for now, if there is no evidence."""

    @property
    def line(self) -> str:
        """The answer as a sentence."""
        text = f"{self.answer}: {self.reason}"
        return f"{text}: {self.course}" if self.course else text


def finish(answer: Decision, as_json: bool) -> NoReturn:
    """Print an answer and end with its exit code."""
    if as_json:
        print(json.dumps(rounded(dataclasses.asdict(answer))))
    else:
        print(answer.line)
    sys.exit(answer.exit_code)

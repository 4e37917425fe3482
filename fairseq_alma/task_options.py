"""Options of the task `alma_lm`."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.data.encoders.gpt2_bpe import DEFAULT_ENCODER_JSON
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks.language_modeling import LanguageModelingConfig

from alma.options import options_of
from alma.protocol import TextOptions
from fairseq_alma.defaults import flag, shared


def _choices(name: str) -> Any:
    """The type of an option of `alma train` with choices, as fairseq declares them."""
    return ChoiceEnum(list(options_of(TextOptions)[name].metadata["choices"]))


_ReplayFrom = _choices("replay_from")
_GrowRouter = _choices("grow_router")
_GrowOptimizer = _choices("grow_optimizer")
_Schedule = _choices("schedule")


@dataclass
class AlmaLMConfig(LanguageModelingConfig):
    """Options of fairseq's language_modeling, of the stage and of growth.

    fairseq cannot read `float | None`, so optional values are `Optional`.
    """

    # Also options of `alma train`, declared in alma.protocol.TextOptions:
    waiting_time: int = shared("waiting_time")
    replay: bool = shared("replay")
    replay_share: float = shared("replay_share")
    replay_from: _ReplayFrom = shared("replay_from")  # type: ignore[valid-type]
    grow_router: _GrowRouter = shared("grow_router")  # type: ignore[valid-type]
    grow_optimizer: _GrowOptimizer = shared("grow_optimizer")  # type: ignore[valid-type]
    no_tf32: bool = shared("no_tf32")
    init: Optional[str] = shared("init")  # noqa: UP045
    schedule: _Schedule = shared("schedule")  # type: ignore[valid-type]
    # Options of fairseq-train alone:
    tokens_per_sample: int = flag(512, "input sequence length in tokens")
    stage: int = flag(0, "which stage to train, from 0")
    megabatch_words: int = flag(
        0,
        "cut a fairseq-preprocess directory into mega-batches of this many words (0: 440000000 "
        "with GPT-2's ids and encoder.json, else one mega-batch)",
    )
    megabatch_tokens: int = flag(0, "as --megabatch-words, in tokens")
    gpt2_encoder_json: str = flag(  # also of --bpe gpt2, whose default it must not change
        DEFAULT_ENCODER_JSON,
        "GPT-2's encoder.json, to count words if dict.txt has ids, not tokens (also found beside "
        "dict.txt)",
    )
    megabatch_seed: int = flag(1, "seed of this cut; use the same in every stage")
    moe_gate_loss_wt: float = flag(0.01, "weight of the load-balancing loss")
    grow_experts: int = flag(
        0,
        "split this many losing experts of --finetune-from-model; --moe-expert-count is the "
        "number after",
    )
    grow_noise: float = flag(
        0.1,
        "standard deviation of the noise between the router rows of parent and copy, half on "
        "each (not in the paper); with 0 the rows are equal, and argmax always picks the parent",
    )
    ema_poly: Optional[float] = flag(  # noqa: UP045
        None,
        "ETA of a polynomial average, with --store-ema and in place of --ema-decay: the k-th "
        "update moves it (ETA + 1) / (k + ETA) of the way to the weights",
    )
    init_sha256: str = flag(
        "", "refuse to train from an --init whose weights have another checksum"
    )
    end_token: int = flag(
        -1, "the id that eos stands for in the model of --init, which sets this (-1: none)"
    )
    expect_tokens: int = flag(
        0, "refuse to train if a full update has another number of tokens (0: any)"
    )
    expect_gpus: int = flag(0, "refuse to train if torch can use fewer GPUs")

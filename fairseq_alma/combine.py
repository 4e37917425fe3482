"""Combine checkpoints into one ensemble: `alma combine`.

fairseq-eval-lm, -interactive and -generate load the result as one model. With averaged probabilities it gives
the same results as `--path a.pt:b.pt`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.files import checkpoint_file, make_directory
from fairseq_alma.defaults import AVERAGES, WEIGHTS_HELP, weights

_EXAMPLES = """\
examples:
  alma combine runs/ens/stage_03/member_*/checkpoint_best.pt --out ensemble.pt
  alma combine first.pt second.pt --combine logits --out ensemble.pt
  # one model with the weights of its average
  alma combine runs/sm/stage_03/checkpoint_last.pt --weights last:8 --out average.pt
  fairseq-eval-lm stream --task alma_lm --path ensemble.pt --gen-subset test
"""


def combine(paths: Sequence[str], average: str, weights: str = "trained") -> dict[str, Any]:
    """The state of the combined checkpoint, of a single model if there is one path.

    UserError: the models cannot form an ensemble.
    """
    from fairseq_alma.checkpoint import PREFIX, memory_map_members  # torch: seconds to import

    states = memory_map_members(paths, weights)
    for path, state in zip(paths, states, strict=True):
        if state["cfg"]["model"]["_name"] == "alma_ensemble":
            raise UserError(f"{path} is an ensemble already: give the checkpoints of its members")
    model = states[0]["model"]
    if len(states) > 1:
        model = {
            f"{PREFIX}members.{i}.{name.removeprefix(PREFIX)}": value
            for i, state in enumerate(states)
            for name, value in state["model"].items()
        }
    members = [state["cfg"]["model"] for state in states]
    config = states[0]["cfg"]
    if len(members) > 1:
        config |= {"model": {"_name": "alma_ensemble", "members": members, "average": average}}
    own = {"ema", "ema_fp32_params"}  # averages of the first member's weights
    extra = {key: value for key, value in states[0].get("extra_state", {}).items() if key not in own}
    return states[0] | {"cfg": config, "model": model, "extra_state": extra, "last_optimizer_state": None}


def parser() -> Parser:
    """The command line."""
    made = Parser(
        prog="python -m fairseq_alma.combine",
        usage="%(prog)s CHECKPOINT... --out FILE [options]",
        description="Combine checkpoints of language models into one checkpoint, an ensemble. "
        "fairseq-eval-lm, -interactive and -generate load it as one model.",
        epilog=_EXAMPLES,
    )
    add = made.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="a member; all members share one dictionary")
    add("--out", type=Path, required=True, metavar="FILE", help="checkpoint to write")
    average = "what the ensemble averages over its members: probabilities or logits (default: probs)"
    add("--combine", choices=AVERAGES, default="probs", help=average)
    add("--weights", type=weights, default="trained", metavar="WEIGHTS", help=WEIGHTS_HELP)
    return made


@command
def main() -> None:
    """Combine checkpoints into one."""
    options = parser().parse_args()
    import torch  # seconds

    state = combine(options.checkpoints, options.combine, options.weights)
    make_directory(options.out.parent)
    with checkpoint_file(options.out) as file:
        torch.save(state, file)
    several = len(options.checkpoints) > 1
    what = f"{len(options.checkpoints)} members, {options.combine} averaged" if several else "one model"
    print(f"{options.out}: {what}")


if __name__ == "__main__":
    main()

"""One checkpoint of several: python -m fairseq_alma.combine CKPT... --out ens.pt [--average probs|logits]

fairseq-eval-lm and fairseq-interactive load it as one model. Averaging probabilities gives what they give
for `--path a.pt:b.pt`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alma.errors import Parser, UserError, command
from alma.files import make_directory, save_tensors
from fairseq_alma.checkpoint import glance
from fairseq_alma.ensemble import AVERAGES

PREFIX = "decoder."


def combine(paths: Sequence[str], average: str) -> dict[str, Any]:
    """The checkpoint of the ensemble. UserError: members that do not fit."""
    states = [glance(path) for path in paths]
    for path, state in zip(paths, states, strict=True):
        _check(path, state, paths[0], states[0])
    model = {
        f"{PREFIX}members.{i}.{name.removeprefix(PREFIX)}": value
        for i, state in enumerate(states)
        for name, value in state["model"].items()
    }
    config = states[0]["cfg"] | {
        "model": {
            "_name": "alma_ensemble",
            "members": [state["cfg"]["model"] for state in states],
            "average": average,
        }
    }
    return states[0] | {"cfg": config, "model": model, "last_optimizer_state": None}


def _check(path: str, state: dict[str, Any], first_path: str, first: dict[str, Any]) -> None:
    """That a member fits the first one."""
    if not (state.get("cfg") and all(name.startswith(PREFIX) for name in state["model"])):
        raise UserError(f"{path} is not the checkpoint of a decoder-only language model of this fairseq")
    if state["cfg"]["model"]["_name"] == "alma_ensemble":
        raise UserError(f"{path} is an ensemble already: give the checkpoints of its members")
    rows, expected = (len(s["model"][f"{PREFIX}embed_tokens.weight"]) for s in (state, first))
    if rows != expected:
        raise UserError(
            f"{path} has a dictionary of {rows} entries, {first_path} of {expected}: "
            "members need one dictionary"
        )
    blocks, expected = (s["cfg"]["task"]["tokens_per_sample"] for s in (state, first))
    if blocks != expected:
        raise UserError(
            f"{path} was trained on blocks of {blocks} tokens, {first_path} on {expected}: "
            "members need one --tokens-per-sample"
        )


@command
def main() -> None:
    """Entry point of `python -m fairseq_alma.combine`."""
    parser = Parser(prog="python -m fairseq_alma.combine", description="Make one checkpoint of several.")
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help="of language models of one dictionary")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the checkpoint to write")
    parser.add_argument("--average", choices=AVERAGES, default="probs", help="over members (default: probs)")
    options = parser.parse_args()
    state = combine(options.checkpoints, options.average)
    make_directory(options.out.parent)
    save_tensors(options.out, state)
    print(f"{options.out}: {len(options.checkpoints)} members, {options.average} averaged")


if __name__ == "__main__":
    main()

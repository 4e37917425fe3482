"""The command `alma`: a subcommand for each tool. `python -m alma` is the same."""

import sys

try:
    import importlib
    from argparse import SUPPRESS
    from itertools import groupby
    from types import ModuleType
    from typing import NamedTuple

    from alma import __version__
    from alma.errors import Parser, command
except KeyboardInterrupt:  # Ctrl-C during these imports: `command` cannot handle it yet
    sys.exit(130)


class Tool(NamedTuple):
    """A subcommand."""

    group: str
    module: str  # imported only when the subcommand runs; has `parser()` and `main()`
    help: str


TOOLS = {
    "corpus": Tool("data", "data_prep.corpus.__main__", "write text that every machine has, dated"),
    "data": Tool("data", "data_prep.__main__", "turn raw text into a stream of mega-batches"),
    "inspect": Tool(
        "data", "data_prep.inspect", "describe a stream and its drift, or verify its files"
    ),
    "train": Tool(
        "training", "slurm.launch", "train a language model on a stream, here or on SLURM"
    ),
    "test": Tool(
        "training", "slurm.arrivals", "test trained models on what has arrived, and train nothing"
    ),
    "images": Tool(
        "training", "vision.run", "train image learners: digits, MNIST, CIFAR, your own folder"
    ),
    "reproduce": Tool("training", "slurm.reproduce", "run and draw a figure or table of the paper"),
    "status": Tool("jobs", "slurm.status", "show the state of runs: progress, errors, logs"),
    "cancel": Tool("jobs", "slurm.cancel", "cancel the SLURM jobs of runs"),
    "report": Tool("results", "alma.report.__main__", "compare runs: tables, figures, a web page"),
    "advise": Tool(
        "results", "alma.report.advice.__main__", "wait, train, grow, average? advice from runs"
    ),
    "matrix": Tool(
        "results", "slurm.matrix.__main__", "test models that exist on every period, for `advise`"
    ),
    "due": Tool("results", "alma.decisions.due", "is a training due now? for cron and CI"),
    "gate": Tool(
        "results", "alma.decisions.gate", "may the newest model replace the deployed one?"
    ),
    "tsne": Tool("results", "vision.tsne", "draw the gating tree of an image mixture"),
    "predict": Tool("checkpoints", "vision.predict", "label images with the model of an image run"),
    "export": Tool(
        "checkpoints", "alma.export", "write a model for Hugging Face, of images for ONNX"
    ),
}
"""The subcommands by name, in the order of the help."""

EXAMPLES = """\
examples:
  alma images --learner sm,ens,gmoe --waiting-time 1,4 --out runs/digits
  alma report runs/digits --html report.html

`alma COMMAND --help` describes the options of a command.
"""


def parser() -> Parser:
    """The command line up to the subcommand."""
    lines = [
        "Anytime learning at macroscale: train and compare models on data that arrives in "
        "mega-batches."
    ]
    for title, tools in groupby(TOOLS.items(), lambda item: item[1].group):
        lines += ["", f"{title}:"]
        lines += [f"  {name:11} {tool.help}" for name, tool in tools]
    command_line = Parser(
        prog="alma",
        usage="alma COMMAND [arguments]",
        description="\n".join(lines),
        epilog=EXAMPLES,
    )
    add = command_line.add_argument
    add("command", nargs="?", choices=TOOLS, metavar="COMMAND", help=SUPPRESS)
    add("--version", action="store_true", help="print the version of ALMA and exit")
    return command_line


def load(name: str) -> ModuleType:
    """Import the module of a subcommand, and set its name in help and errors to `alma NAME`."""
    sys.argv[0] = f"alma {name}"
    return importlib.import_module(TOOLS[name].module)


@command
def main() -> None:
    """Run a subcommand as if its module had been started."""
    first, *arguments = sys.argv[1:] or ["--help"]
    if first in TOOLS:
        sys.argv[1:] = arguments
        load(first).main()
        return
    parser().parse_args([first])
    print(f"alma {__version__}")


if __name__ == "__main__":
    main()

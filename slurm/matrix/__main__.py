"""Test models that exist on every period of dated data: `alma matrix`."""

from pathlib import Path

from alma.dates import Dates, date_format, span
from alma.errors import Parser, command, count
from slurm.engine import resources

_EXAMPLES = """\
examples:
  alma matrix models/news-2024-* --data news.jsonl --by month
  alma matrix now before --cutoff now=2024-06 --cutoff before=2024-03 --data news.parquet --by month
  alma matrix a-2024-03.pkl a-2024-06.pkl --data sales.jsonl --by week --command 'python eval.py' \\
    --metric MAPE
"""
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def parser() -> Parser:
    """The command line."""
    command_line = Parser(
        prog="alma matrix",
        usage="%(prog)s MODEL... --data FILE... --by PERIOD [options]",
        description="Test models that exist on every period of dated data, and write the file that "
        "`alma advise --matrix` reads. Killed and rerun, it measures only what is missing.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    models = "a folder of Hugging Face with its tokenizer; a run of `alma train`, for the models "
    models += "of all its stages, or a stage; with --command any file, folder or name"
    command_line.add_argument("models", nargs="+", metavar="MODEL", help=models)
    _add_models(command_line)
    _add_data(command_line)
    _add_program(command_line)
    group = command_line.add_argument_group("where to run, and what to write")
    add = group.add_argument
    out = "the matrix (default: matrix.csv); its cells go into a folder beside it, matrix.cells"
    add("--out", type=Path, default=Path("matrix.csv"), metavar="FILE", help=out)
    dry_run = "show the models with their dates; test and write nothing"
    add("--dry-run", action="store_true", help=dry_run)
    resources.add_cluster(group, "local", "slurm")
    add("--wait", action="store_true", help=resources.WAIT)
    resources.add_flags(command_line, job="test of a model")
    return command_line


def _add_models(command_line: Parser) -> None:
    """Add the flags about the dates and names of models."""
    add = command_line.add_argument_group("models").add_argument
    cutoff = "the date until which a model was trained; may repeat (default: the date in its name, "
    cutoff += "such as 2024-03 or 202403, of its run, or on the card of `alma export`)"
    add("--cutoff", action="append", default=[], metavar="MODEL=DATE", help=cutoff)
    group = "models of one group differ by their dates alone; may repeat (default: the name "
    group += "without its date)"
    add("--group", action="append", default=[], metavar="MODEL=NAME", help=group)


def _add_data(command_line: Parser) -> None:
    """Add the flags about the data."""
    add = command_line.add_argument_group("data").add_argument
    data = ".jsonl, .csv, .parquet or .arrow files with dated records, folders of these, or "
    data += "patterns"
    add("--data", nargs="+", required=True, metavar="FILE", help=data)
    by = "year, quarter, month, week, or N-years"
    add("--by", type=span, required=True, metavar="PERIOD", help=by)
    key = "field of the records with the date (default: date)"
    add("--date-key", default=Dates.key, metavar="KEY", help=key)
    form = "form of the dates: seconds, %%Y%%m%%d, ... (default: docs/data.md)"
    add("--date-format", type=date_format, metavar="FORMAT", help=form)
    add("--from", metavar="DATE", help="leave out records before this date")
    add("--until", metavar="DATE", help="leave out records after this date")
    undated = (
        "records without a usable date: stop with an error, or leave them out (default: error)"
    )
    add("--undated", choices=("error", "skip"), default="error", help=undated)
    bad = "malformed records: stop with an error, or leave them out (default: error)"
    add("--on-bad-input", choices=("error", "skip"), default="error", help=bad)
    text = "field of the records with the text (default: text)"
    add("--text-key", metavar="KEY", help=text)


def _add_program(command_line: Parser) -> None:
    """Add the flags about what measures the models."""
    add = command_line.add_argument_group("program").add_argument
    program = "your program, which gets the path of a stage.json with the model and the periods"
    add("--command", metavar="COMMAND", help=program)
    metric = "with --command: what its values are, and the column's name, such as accuracy "
    metric += "(default: losses in nats a token, which become bits_per_byte)"
    add("--metric", metavar="NAME", help=metric)
    of_folders = "of folders of Hugging Face"
    blocks = f"{of_folders}: tokens of a block (default: positions of the model, at most 1,024)"
    add("--block-size", type=count, metavar="N", help=blocks)
    add(
        "--batch-size", type=count, metavar="N", help=f"{of_folders}: blocks at a time (default: 8)"
    )
    dtype = f"{of_folders}: type of the weights (default: auto, as saved)"
    add("--dtype", choices=_DTYPES, help=dtype)
    device = f"{of_folders}: auto is a GPU if there is one (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda"), help=device)


@command
def main() -> None:
    """Test the models, and write the matrix."""
    options = parser().parse_args()
    resources.check_cluster(options, slurm=("wait",))
    from slurm.matrix.run import make_matrix  # imports NumPy

    make_matrix(options)


if __name__ == "__main__":
    main()

"""fairseq's command lines for `--task alma_lm`: our defaults, and one line for each kind of error."""

import argparse
import ast
import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from alma.epochs import WARMUP, warmup_of
from alma.errors import UserError, closest, hint
from alma.options import flag_of, joined_words
from fairseq_alma import defaults, flags, initial, saved_config
from fairseq_alma.switch_lm import SwitchLanguageModel
from fairseq_alma.training.epochs import PLANNED_WARMUP

logger = logging.getLogger(__name__)

TASK = saved_config.TASK


def is_ours(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Whether a command line has `--task alma_lm`, given or by default, or a task that does not exist."""
    task = _last_value(words, "--task", parser.get_default("task"))
    return task == TASK or task not in TASK_REGISTRY


def is_given(words: Sequence[str], default: str) -> bool:
    """Whether a command line, whose parser is still to be built, has `--task alma_lm`."""
    return _last_value(words, "--task", default) == TASK


def missing_user_dir(error: FileNotFoundError) -> str:
    """The line for fairseq's error of a --user-dir that does not exist."""
    return f"--user-dir {error}: no such directory; give the path of your code"


def _last_value(words: Sequence[str], flag: str, default: str) -> str:
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == flag:
            default = value or following
    return default


def parse(
    original: Callable, parser: argparse.ArgumentParser, words: Sequence[str], modify: Callable | None
) -> argparse.Namespace:
    """Parse `words` with `original`, fairseq's parse_args_and_arch, but with our defaults and UserErrors."""
    training = "--max-update" in parser._option_string_actions
    model = _last_value(words, "--init", "") if training else ""
    of_model = initial.read(model)[0] if model else {}
    theirs = itertools.starmap(joined_words, of_model.items())
    words = [*itertools.chain.from_iterable(theirs), *words]  # the last of repeated flags counts
    schedule = _last_value(words, "--schedule", "stage")
    scheduler = defaults.SCHEDULES.get(schedule, "polynomial_decay")  # the parser refuses another schedule
    given: set[str] = set()  # flags in `words`, each under the first of its names
    checked: set[argparse.Action] = set()

    def prepare(parser: argparse.ArgumentParser) -> None:
        # fairseq calls it twice: before it adds the flags of arch, task, optimizer and scheduler, and after.
        if modify:
            modify(parser)
        for action in set(parser._actions) - checked:
            _check_values(action)
        known = parser._option_string_actions
        if checked and not of_model.keys() <= known.keys():
            raise UserError(f"--arch: {model} is a {of_model['--arch']}, and this is none: leave --arch out")
        checked.update(parser._actions)
        names = (word.partition("=")[0] for word in words)
        given.update(known[name].option_strings[0] for name in names if name in known)
        if training:
            for flag, value in defaults.chosen(given, scheduler).items():
                if flag in known:
                    parser.set_defaults(**{known[flag].dest: value})

    def run(words: Sequence[str]):
        return original(parser, words, parse_known=True, modify_parser=prepare)

    parser.error = lambda message: _refuse(parser, message)  # type: ignore[method-assign]
    if training:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        lengths = {"--warmup-updates": f"{WARMUP}, at most a tenth of --total-num-update"}
        lengths["--total-num-update"] = "the value of --max-update, or the updates of --max-epoch"
        shown = (f"  {_shown({flag: value})}" for flag, value in (defaults.TRAINING | lengths).items())
        parser.epilog = "\n".join((f"defaults of --task {TASK}:", *shown))
    if asking := {"-h", "--help"}.intersection(words):
        with contextlib.suppress(UserError):  # whatever else is wrong, the parser now has all flags
            run([word for word in words if word not in asking])
        parser.print_help()
        sys.exit()
    args, unknown = run(words)
    if unknown:
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
        near = {flag: closest(flag, parser._option_string_actions) for flag in names}
        hints = {flag: f": did you mean {meant}?" if meant else "" for flag, meant in near.items()}
        raise UserError("; ".join(f"unrecognized argument {flag}{hints[flag]}" for flag in names))
    if training:
        flags.check(parser, args, given)
        if of_model:
            off = [flag for flag, value in of_model.items() if value is False and flag not in given]
            vars(args).update((flag[2:].replace("-", "_"), False) for flag in off)  # on in some archs
            initial.check(args)
        _check_model(args)
        _fill_schedule(args, given, scheduler)
        chosen = defaults.chosen(given, scheduler).items()
        used = {flag: value for flag, value in chosen if hasattr(args, flag[2:].replace("-", "_"))}
        if not args.max_update:
            used.pop("--max-update", None)
        logger.info(f"defaults of --task {TASK}: {_shown(used)}")
    return args


def _shown(values: dict[str, object]) -> str:
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in values.items())


def _check_model(args: argparse.Namespace) -> None:
    """UserError: `fairseq_alma.evaluate` cannot measure the model, or would leave out blocks over a limit."""
    for name in ("max_target_positions", "max_tokens", "max_tokens_valid"):
        flag, limit, length = flag_of(name), getattr(args, name), args.tokens_per_sample
        if limit and limit < length:
            why = f"a block has {length} tokens and could not be evaluated"
            raise UserError(f"{flag} {limit}: {why}: give {flag} {length} or more")
    kind, name = ARCH_MODEL_REGISTRY[args.arch], ARCH_MODEL_NAME_REGISTRY[args.arch]
    if not saved_config.is_trained(args.arch):
        of_fairseq = ", ".join(saved_config.FAIRSEQ_MODELS)
        trained = f"switch_gmoe*, {of_fairseq} and your own language models (--user-dir)"
        raise UserError(f"--arch {args.arch}: the task {TASK} trains {trained}")
    if issubclass(kind, SwitchLanguageModel):
        kind.check(args)
    _check_tied(args)
    if name not in ("transformer_lm", "lightconv_lm"):  # the others use these with adaptive_loss only
        return
    for part in ("adaptive_softmax_cutoff", "adaptive_input", "character_embeddings", "base_layers"):
        if getattr(args, part, None):  # no logits, or no formula in alma.flops
            why = "perplexity or FLOPs cannot be measured; leave it out"
            raise UserError(f"--arch {args.arch} with {flag_of(part)}: {why}")


def _check_tied(args: argparse.Namespace) -> None:
    """UserError: tied embeddings whose input and output have other widths."""
    pairs = [("decoder_input_dim", "decoder_output_dim"), ("decoder_embed_dim", "decoder_out_embed_dim")]
    for names in pairs:
        widths = {getattr(args, name, None) for name in names}
        if getattr(args, "share_decoder_input_output_embed", False) and len(widths - {None}) == 2:
            first, second = map(flag_of, names)
            raise UserError(f"{first} and {second} differ, but embeddings are tied: give both the same")


def _fill_schedule(args: argparse.Namespace, given: set[str], scheduler: str) -> None:
    """Set the length of our schedule, `scheduler`, and that of its warm-up, unless they are given.

    If --max-epoch alone ends the training, both are set once its batches are counted (`training.epochs`).
    UserError: inverse_sqrt without a warm-up, by whose length fairseq divides.
    """
    if args.max_epoch and "--max-update" not in given:
        args.max_update = 0
    by_epochs = args.max_epoch and not args.max_update
    if args.lr_scheduler == "inverse_sqrt" and (updates := args.warmup_updates) < 1:
        raise UserError(f"--warmup-updates {updates}: inverse_sqrt needs 1 or more")
    if args.lr_scheduler != scheduler:
        return
    total: Any = args.max_update or defaults.TRAINING["--max-update"]
    if by_epochs:
        total = 0
    if args.lr_scheduler == "polynomial_decay":
        if "--total-num-update" not in given:
            args.total_num_update = total
        total = int(args.total_num_update)
    if "--warmup-updates" not in given:
        args.warmup_updates = warmup_of(total) if total else PLANNED_WARMUP


def _check_values(action: argparse.Action) -> None:
    """Let argparse check lists and tuples of numbers; fairseq would evaluate them later, with a traceback."""
    # fairseq declares no type where the default is another flag's value.
    numbers = {"total_num_update": float, "max_tokens_valid": int, "batch_size_valid": int}
    action.type = numbers.get(action.dest, action.type)
    convert, default = action.type or str, action.default
    tuple_as_text = convert is str and isinstance(default, (tuple, list))
    evaluated = action.dest in saved_config.EVALUATED and convert not in (int, float)
    if isinstance(convert, type) and not tuple_as_text and not evaluated:
        return

    def convert_or_refuse(text: str) -> Any:
        try:
            if evaluated:  # before `convert`, which evaluates it
                saved_config.check_literal(text)
            if tuple_as_text and len(ast.literal_eval(text)) != len(default):
                raise ValueError
            return convert(text)  # type: ignore[operator]
        except argparse.ArgumentTypeError:
            raise
        except Exception as error:  # fairseq evaluates the text
            raise argparse.ArgumentTypeError(f"invalid value: {text!r}") from error

    action.type = convert_or_refuse


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise argparse's `message` as a UserError."""
    if choice := re.match(r"argument (\S+?)(?:/\S+)?: invalid choice: (['\"])(.*?)\2 \(", message):
        flag, value = choice[1], choice[3]
        names = [str(each) for each in parser._option_string_actions[flag].choices or ()]
        raise UserError(f"{flag} {value}: no such choice; {hint(value, names)}")
    if message == "the following arguments are required: data":
        raise UserError("no data: give the stream directory, `fairseq-train STREAM --task alma_lm …`")
    raise UserError(message.removeprefix("argument "))

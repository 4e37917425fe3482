"""fairseq's command lines for `--task alma_lm`: our defaults, and one line for each kind of
error."""

import argparse
import ast
import contextlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from fairseq import utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from alma.epochs import WARMUP, warmup_of
from alma.errors import UserError, closest, hint
from alma.options import flag_of, joined_words
from fairseq_alma import defaults, flags, initial, saved_config
from fairseq_alma.defaults import attribute_of
from fairseq_alma.switch_lm import SwitchLanguageModel
from fairseq_alma.training.epochs import PLANNED_WARMUP

logger = logging.getLogger(__name__)

TASK = saved_config.TASK


def is_ours(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """Whether a command line has `--task alma_lm`, given or by default, or a task that does not
    exist.

    FileNotFoundError: the task may be in --user-dir, which does not exist.
    """
    task = _last_value(words, "--task", parser.get_default("task"))
    user_dir = _last_value(words, "--user-dir", "")
    if task not in TASK_REGISTRY and user_dir:
        # A program that builds its parser itself gives --user-dir here for the first time. fairseq
        # imports the folder next, and would know the task then.
        utils.import_user_module(argparse.Namespace(user_dir=user_dir))
    return task == TASK or task not in TASK_REGISTRY


def is_given(words: Sequence[str], default: str) -> bool:
    """Whether a command line, whose parser is still to be built, has `--task alma_lm`."""
    return _last_value(words, "--task", default) == TASK


def missing_user_dir(error: FileNotFoundError) -> str:
    """The message for a --user-dir that does not exist; `error` is fairseq's."""
    return f"--user-dir {error}: no such directory; give the path of your code"


def _last_value(words: Sequence[str], flag: str, default: str) -> str:
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == flag:
            default = value or following
    return default


def parse(
    original: Callable,
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    modify: Callable | None,
) -> argparse.Namespace:
    """Parse `words` with our defaults and UserErrors.

    `original` is fairseq's parse_args_and_arch, which calls `modify` with the parser.
    """
    training = "--max-update" in parser._option_string_actions
    line = _Line(words, training, modify)

    def run(words: Sequence[str]):
        return original(parser, words, parse_known=True, modify_parser=line.prepare)

    parser.error = lambda message: _refuse(parser, message)  # type: ignore[method-assign]
    if training:
        _describe_defaults(parser)
    help_flags = {"-h", "--help"}.intersection(words)
    if help_flags:
        # Parsing adds the flags of arch, task and optimizer to the parser. Help needs these flags
        # even if the command line has errors.
        with contextlib.suppress(UserError):
            run([word for word in line.words if word not in help_flags])
        parser.print_help()
        sys.exit()
    args, unknown = run(line.words)
    if unknown:
        _refuse_unknown(parser, unknown)
    if training:
        _complete(parser, args, line)
    return args


class _Line:
    """The state of one command line between the two calls of `prepare`."""

    def __init__(self, words: Sequence[str], training: bool, modify: Callable | None):
        self.training = training
        self.modify = modify
        self.model = _last_value(words, "--init", "") if training else ""
        self.model_flags = initial.read(self.model)[0] if self.model else {}
        self.words: list[str] = []
        for flag, value in self.model_flags.items():
            self.words += joined_words(flag, value)
        self.words += words  # after those of the model: the last of repeated flags counts
        schedule = _last_value(words, "--schedule", "stage")
        # An unknown --schedule gets any default here: the parser refuses it later.
        self.scheduler = defaults.SCHEDULES.get(schedule, "polynomial_decay")
        self.given_flags: set[str] = set()  # flags in `words`, each under the first of its names
        self.checked: set[argparse.Action] = set()

    def prepare(self, parser: argparse.ArgumentParser) -> None:
        """Check the values of the parser's flags, and set our defaults.

        fairseq calls it twice: before it adds the flags of arch, task, optimizer and scheduler, and
        after.
        """
        if self.modify:
            self.modify(parser)
        for action in set(parser._actions) - self.checked:
            _check_values(action)
        actions = parser._option_string_actions
        if self.checked and not self.model_flags.keys() <= actions.keys():
            problem = f"{self.model} is a {self.model_flags['--arch']}, and this is none"
            raise UserError(f"--arch: {problem}: leave --arch out")
        self.checked.update(parser._actions)
        for word in self.words:
            name = word.partition("=")[0]
            if name in actions:
                self.given_flags.add(actions[name].option_strings[0])
        if self.training:
            for flag, value in self.defaults().items():
                if flag in actions:
                    parser.set_defaults(**{actions[flag].dest: value})

    def defaults(self) -> dict[str, object]:
        """Our defaults that apply."""
        return defaults.chosen(self.given_flags, self.scheduler)


def _describe_defaults(parser: argparse.ArgumentParser) -> None:
    """List our defaults of fairseq-train below its help."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"defaults of --task {TASK}:"]
    lines += [f"  {_shown({flag: value})}" for flag, value in defaults.TRAINING.items()]
    lines.append(f"  --warmup-updates {WARMUP}, at most a tenth of --total-num-update")
    lines.append("  --total-num-update the value of --max-update, or the updates of --max-epoch")
    parser.epilog = "\n".join(lines)


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Raise a UserError for words that the parser does not know; it suggests similar flags."""
    flags_alone = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    problems = []
    for name in flags_alone or unknown:
        meant = closest(name, parser._option_string_actions)
        question = f": did you mean {meant}?" if meant else ""
        problems.append(f"unrecognized argument {name}{question}")
    raise UserError("; ".join(problems))


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace, line: _Line) -> None:
    """Check the parsed arguments of a training, fill in its schedule and log our defaults."""
    flags.check(parser, args, line.given_flags)
    if line.model:
        for flag, value in line.model_flags.items():
            if value is False and flag not in line.given_flags:
                setattr(args, attribute_of(flag), False)  # some archs set it
        initial.check(args)
    _check_model(args)
    _fill_schedule(args, line.given_flags, line.scheduler)
    used = {}
    for flag, value in line.defaults().items():
        if hasattr(args, attribute_of(flag)):
            used[flag] = value
    if not args.max_update:
        used.pop("--max-update", None)
    logger.info(f"defaults of --task {TASK}: {_shown(used)}")


def _shown(values: dict[str, object]) -> str:
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in values.items())


def _check_model(args: argparse.Namespace) -> None:
    """Raise a UserError for a model that cannot be evaluated after training.

    `fairseq_alma.evaluate` needs logits and a FLOPs formula, and blocks no longer than the model's
    context.
    """
    length = args.tokens_per_sample
    for name in ("max_target_positions", "max_tokens", "max_tokens_valid"):
        limit = getattr(args, name)
        if limit and limit < length:
            flag = flag_of(name)
            problem = f"a block has {length} tokens and could not be evaluated"
            raise UserError(f"{flag} {limit}: {problem}: give {flag} {length} or more")
    if not saved_config.is_trained(args.arch):
        of_fairseq = ", ".join(saved_config.FAIRSEQ_MODELS)
        trained = f"switch_gmoe*, {of_fairseq} and your own language models (--user-dir)"
        raise UserError(f"--arch {args.arch}: the task {TASK} trains {trained}")
    kind = ARCH_MODEL_REGISTRY[args.arch]
    if issubclass(kind, SwitchLanguageModel):
        kind.check(args)
    _check_tied(args)
    if ARCH_MODEL_NAME_REGISTRY[args.arch] not in ("transformer_lm", "lightconv_lm"):
        return  # the other models use the options below with adaptive_loss only
    # With these options the model returns no logits, or alma.flops has no formula for it.
    for part in (
        "adaptive_softmax_cutoff",
        "adaptive_input",
        "character_embeddings",
        "base_layers",
    ):
        if getattr(args, part, None):
            problem = "perplexity or FLOPs cannot be measured; leave it out"
            raise UserError(f"--arch {args.arch} with {flag_of(part)}: {problem}")


def _check_tied(args: argparse.Namespace) -> None:
    """Raise a UserError if tied input and output embeddings have different widths."""
    if not getattr(args, "share_decoder_input_output_embed", False):
        return
    pairs = (
        ("decoder_input_dim", "decoder_output_dim"),
        ("decoder_embed_dim", "decoder_out_embed_dim"),
    )
    for names in pairs:
        widths = {getattr(args, name, None) for name in names}
        if len(widths - {None}) == 2:
            first, second = map(flag_of, names)
            problem = f"{first} and {second} differ, but embeddings are tied"
            raise UserError(f"{problem}: give both the same")


def _fill_schedule(args: argparse.Namespace, given_flags: set[str], scheduler: str) -> None:
    """Set the lengths of our default schedule, `scheduler`, and of its warm-up.

    A length that the command line gives stays. If --max-epoch alone ends the training, both are set
    once its batches are counted (`training.epochs`). UserError: inverse_sqrt without a warm-up, by
    whose length fairseq divides.
    """
    if args.max_epoch and "--max-update" not in given_flags:
        args.max_update = 0
    by_epochs = args.max_epoch and not args.max_update
    if args.lr_scheduler == "inverse_sqrt" and args.warmup_updates < 1:
        raise UserError(f"--warmup-updates {args.warmup_updates}: inverse_sqrt needs 1 or more")
    if args.lr_scheduler != scheduler:
        return
    total: Any = args.max_update or defaults.TRAINING["--max-update"]
    if by_epochs:
        total = 0
    if args.lr_scheduler == "polynomial_decay":
        if "--total-num-update" not in given_flags:
            args.total_num_update = total
        total = int(args.total_num_update)
    if "--warmup-updates" not in given_flags:
        args.warmup_updates = warmup_of(total) if total else PLANNED_WARMUP


def _check_values(action: argparse.Action) -> None:
    """Let argparse check lists and tuples of numbers.

    fairseq would evaluate them later and end with a traceback.
    """
    # fairseq declares no type where the default is another flag's value.
    numbers = {"total_num_update": float, "max_tokens_valid": int, "batch_size_valid": int}
    action.type = numbers.get(action.dest, action.type)
    convert = action.type or str
    default = action.default
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
    choice = re.match(r"argument (\S+?)(?:/\S+)?: invalid choice: (['\"])(.*?)\2 \(", message)
    if choice:
        flag = choice[1]
        value = choice[3]
        names = list(map(str, parser._option_string_actions[flag].choices or ()))
        raise UserError(f"{flag} {value}: no such choice; {hint(value, names)}")
    if message == "the following arguments are required: data":
        remedy = "give the stream directory, `fairseq-train STREAM --task alma_lm …`"
        raise UserError(f"no data: {remedy}")
    raise UserError(message.removeprefix("argument "))

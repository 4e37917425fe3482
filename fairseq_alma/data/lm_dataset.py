"""Blocks of tokens as a data set of fairseq's language modelling."""

from collections.abc import Callable

from fairseq.data import MonolingualDataset, TokenBlockDataset
from fairseq.tasks.language_modeling import LanguageModelingTask

from fairseq_alma.data import preprocessed, token_blocks

WithReplay = Callable[[token_blocks.TokenBlocks], token_blocks.TokenBlocks]


def build(
    task: LanguageModelingTask,
    tokens: token_blocks.Tokens,
    length: int,
    with_replay: WithReplay | None = None,
) -> MonolingualDataset:
    """The tokens as blocks of `length`, cut and padded as the task's flags say.

    `with_replay` adds old blocks to those across items; None: there is no replay.
    """
    args = task.args
    eos = task.dictionary.eos()
    across_items = args.sample_break_mode in (None, "none")
    blocks: token_blocks.TokenBlocks | TokenBlockDataset
    if not across_items or task.targets != ["future"]:
        indexed = preprocessed.indexed(tokens.prefixes)
        blocks = TokenBlockDataset(
            indexed,
            indexed.sizes,
            length,
            pad=task.dictionary.pad(),
            eos=eos,
            break_mode=args.sample_break_mode,
            include_targets=True,
        )
    else:
        blocks = token_blocks.TokenBlocks(tokens, length, eos)
        if with_replay:
            blocks = with_replay(blocks)
    return token_blocks.LanguageModelDataset(
        blocks,
        blocks.sizes,
        task.dictionary,
        task.output_dictionary,
        add_eos_for_other_targets=not across_items,
        shuffle=True,
        targets=task.targets,
        add_bos_token=args.add_bos_token,
        fixed_pad_length=length if args.pad_to_fixed_length else None,
        pad_to_bsz=args.batch_size if args.pad_to_fixed_bsz else None,
    )

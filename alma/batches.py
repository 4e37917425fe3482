"""Size of fairseq's batches, for the plan of a training and for the training itself."""


def tokens_of(
    passes: int, batch_size: int | None, max_tokens: int | None, length: int, multiple: int
) -> int | None:
    """Tokens of `passes` full batches of sequences of `length` tokens; None without a limit.

    batch_size, max_tokens: limits of a batch; multiple: --required-batch-size-multiple. `passes`: 1
    for a forward pass, the processes times --update-freq for an update.
    """
    limits = [batch_size, (max_tokens or 0) // length]
    sequences = min((limit for limit in limits if limit), default=None)
    if not sequences:
        return None
    # With multiple 8, fairseq makes batches of 8 from --batch-size 12, and of 16 from 20.
    return passes * length * max(sequences // multiple * multiple, sequences % multiple)

"""Token ids of a part of a stream, as the model of the stream's tokenizer counts them."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from alma.stream import DTYPES, EOS, SPECIALS, read_index

if TYPE_CHECKING:
    import numpy as np


class TokenIds:
    """The ids of fairseq's .bin file, memory-mapped; a slice is converted when it is read.

    end_token: the id that ends a document in the ids of the model whose tokenizer the stream has;
    None: the stream has fairseq's ids.
    """

    def __init__(self, tokens: Path, index: Path, end_token: int | None) -> None:
        """Map the file. UserError: `index` is no index of fairseq."""
        import numpy as np

        dtype = DTYPES[read_index(index)[1]]
        self._of_fairseq: np.ndarray = np.empty(0, dtype)
        if os.path.getsize(tokens):  # an empty file cannot be mapped
            self._of_fairseq = np.memmap(tokens, dtype, "r")
        self._end_token = end_token

    @classmethod
    def in_memory(cls, ids: "np.ndarray") -> "TokenIds":
        """Ids of a model, (tokens,), that are in no file."""
        token_ids = cls.__new__(cls)
        token_ids._of_fairseq = ids
        token_ids._end_token = None
        return token_ids

    def __len__(self) -> int:
        return len(self._of_fairseq)

    def read(self, start: int = 0, end: int | None = None) -> "np.ndarray":
        """The ids [start, end), (end - start,): int64 ids of the model, or fairseq's as mapped."""
        import numpy as np

        ids = self._of_fairseq[start:end]
        if self._end_token is None:
            return ids
        of_model = ids.astype(np.int64) - SPECIALS
        of_model[ids == EOS] = self._end_token
        return of_model

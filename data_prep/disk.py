"""The disk that a stream takes while it is made, estimated before hours of work."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from alma.errors import UserError
from data_prep.cut import Wanted

_RATIO = 3
"""Bytes of text in a compressed byte; English and web text give 2.7 to 8."""
_SCANNED, _TAKEN = 0.2, 2.3
"""Bytes of disk for a byte of text: its records; and for what the stream takes, all intermediate files."""
_WORD_BYTES = 7


def require_space(out: Path, files: Iterable[str], wanted: Wanted, work: Path) -> None:
    """UserError: `out` has too little free disk for the stream; `work`: its work directory, if any yet."""
    packed = (".gz", ".zst", ".bz2", ".xz", ".parquet")
    text = sum(os.path.getsize(path) * (_RATIO if path.endswith(packed) else 1) for path in files)
    sizes = {"megabatch": wanted.words, "test": wanted.eval_words, "valid": wanted.valid_words}
    words = sum(sizes[name.partition("_")[0]] for name in wanted.names)
    taken = min(text, _WORD_BYTES * words) if wanted.words and words else text  # 0: periods yet unknown
    held = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    need = (_SCANNED * text + _TAKEN * taken - held) / 1e9
    free = shutil.disk_usage(out).free / 1e9
    if need > free:
        raise UserError(
            f"{out}: making this stream takes about {need:,.1f} GB of disk, and {free:,.1f} GB are free "
            "there; free some, choose an --out on another disk, or give --no-disk-check if this is wrong"
        )

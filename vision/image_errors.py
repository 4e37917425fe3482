"""What Pillow raises for files that are no images."""

import struct
import zlib

NO_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    struct.error,
    zlib.error,
)

"""Placeholder while the growth is written."""
from vision.learners.sm import SM


class Firefly(SM):
    """Grows."""

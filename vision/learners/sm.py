"""SM: a single model (section 4.1)."""

from vision.learners.base import Learner


class SM(Learner):
    """One network, fine-tuned at every stage."""

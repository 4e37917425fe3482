"""SM: one model, trained further at every stage (section 4.1)."""

from typing import Any

from vision.learners.base import Learner
from vision.models import Backbone


class SM(Learner):
    """A single model."""

    def build(self, structure: dict[str, Any]) -> Backbone:
        """One network."""
        return self.backbone()

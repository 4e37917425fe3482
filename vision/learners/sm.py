"""SM: a single model (section 4.1)."""

from typing import Any

from vision.learners.base import Learner
from vision.models import Backbone


class SM(Learner):
    """One network, fine-tuned at every stage."""

    def build(self, structure: dict[str, Any]) -> Backbone:
        return self.backbone()

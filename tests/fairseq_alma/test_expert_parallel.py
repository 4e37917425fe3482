"""What does not go with expert parallelism; two processes are in test_train."""

from types import SimpleNamespace

import pytest
from fairseq.distributed import utils as distributed_utils

from alma.errors import UserError
from fairseq_alma.expert_parallel import check


def test_experts_have_to_be_a_multiple_of_the_processes(build, monkeypatch):
    monkeypatch.setattr(distributed_utils, "get_data_parallel_world_size", lambda: 3)
    with pytest.raises(UserError, match="4 experts cannot be shared out evenly to 3 processes"):
        build("--moe-expert-parallel")
    build()


@pytest.mark.parametrize(
    ("backend", "no_last", "words"),
    [("fully_sharded", False, "use legacy_ddp"), ("legacy_ddp", True, "--no-last-checkpoints")],
)
def test_options_that_do_not_go_with_it_are_refused(backend, no_last, words):
    cfg = SimpleNamespace(
        distributed_training=SimpleNamespace(ddp_backend=backend),
        checkpoint=SimpleNamespace(no_last_checkpoints=no_last),
    )
    with pytest.raises(UserError, match=words):
        check(cfg)

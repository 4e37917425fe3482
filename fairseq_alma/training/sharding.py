"""--zero-sharding os: each process keeps the optimizer's state of its share of the parameters.

This is ZeRO stage 1 (Rajbhandari et al., 2020) by fairscale's OSS, as fairseq offers it. Every
process has all weights and gradients, updates its share, and receives the rest from the others. A
share has whole parameters. Checkpoints hold the complete state, so that a training may resume
without sharding or with another number of processes.
"""

from typing import Any

import torch.distributed as dist
from fairscale.optim.oss import OSS
from fairseq import utils
from torch import Tensor
from torch.optim import Optimizer

from alma.errors import UserError
from fairseq_alma.moe.expert_parallel import params_of
from fairseq_alma.training import precision


class ShardedOptimizer(OSS):
    """fairscale's OSS as fairseq adapts it, with complete checkpoints and one copy of the state.

    `optim` is the optimizer of this process's share. No upstream issue known; unnecessary once OSS
    restores its share by `optim.load_state_dict` and frees the state that it has gathered.
    """

    disable_mem_eff_fp16_loading_hack = True  # OSS keeps the precision of the saved state

    def __getattr__(self, name: str) -> Any:
        """Forward `supports_...`, which fairseq reads, to the optimizer of this process's share."""
        if name.startswith("supports"):
            return getattr(self.optim, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the states of all shares in the host memory of one process. Collective.

        OSS would send every share to every process, and unpickle it on the GPU of its sender.
        """
        OSS._sync_param_groups(self.param_groups, self.optim.param_groups)
        own_state = utils.apply_to_sample(Tensor.cpu, self.optim.state_dict())
        if self.rank != recipient_rank:
            recipient = self._local_to_global_rank[recipient_rank]
            dist.send_object_list([own_state], dst=recipient, group=self.group)
            return
        self._all_states = []
        for rank, source in enumerate(self._local_to_global_rank):
            received = [own_state]
            if rank != self.rank:
                dist.recv_object_list(received, src=source, group=self.group)
            self._all_states.append(received[0])

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """The complete state, on process 0 alone and after `consolidate_state_dict`, a
        collective."""
        complete = super().state_dict()
        self._all_states.clear()  # else process 0 keeps the state of all until the next checkpoint
        return complete

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this process's share of the complete state, and the fp32 weights of all."""
        states = {index: dict(state) for index, state in state_dict["state"].items()}
        precision.take_weights(params_of(self), states)
        super().load_state_dict({**state_dict, "state": states})
        self.state.clear()  # a second copy: `optim.state` is the one in use


def optimizer_of_share(sharded: OSS) -> Optimizer:
    """Change the class of `sharded` to ShardedOptimizer, and return its `optim`.

    fairseq has just built the object. Its class is defined inside a function, so it cannot be
    replaced before.
    """
    sharded.__class__ = ShardedOptimizer
    return sharded.optim


def check(cfg, processes: int) -> None:
    """Raise a UserError if `cfg` asks for a sharded optimizer in a training with one process."""
    if cfg.distributed_training.zero_sharding == "os" and processes == 1:
        problem = "divides the optimizer's state among processes, and this training has one"
        remedy = "leave it out, or give --distributed-world-size 2 or more"
        raise UserError(f"--zero-sharding os {problem}: {remedy}")

"""The norm of all gradients, and clipping by it."""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(original, params, max_norm: float, aggregate_norm_fn=None) -> Tensor:
    """Clip gradients by their norm, which includes the experts of all processes.

    Replaces fairseq's function `original`, which launches kernels for each tensor, takes the norm
    of gradients on a CPU to the GPU if there is one, and leaves out parameters with an attribute
    `expert` (they differ between processes). Returns the norm before clipping, a scalar, equal to
    the bit to fairseq's on a CPU; on a GPU torch adds up the squares in another order. Collective
    with expert parallelism. No upstream issue known; unnecessary once the norm stays where the
    gradients are.
    """
    params = [params] if isinstance(params, Tensor) else list(params)
    trained = [param for param in params if param.grad is not None]
    shared = [param.grad for param in trained if not hasattr(param, "expert")]
    experts = [param.grad for param in trained if hasattr(param, "expert")]
    has_experts = any(hasattr(param, "expert") for param in params)
    if aggregate_norm_fn is not None or not (shared or has_experts):
        return original(params, max_norm, aggregate_norm_fn)
    norm = _norm(shared, params[0].device)
    if has_experts:
        norm = (norm.square() + _squares_of_all(experts, params[0].device)).sqrt()
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp_(max=1)
        torch._foreach_mul_(shared + experts, factor)
    return norm


def _norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The norm of all `gradients` together, a scalar in fp32."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms))


def _squares_of_all(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of the experts' gradients in all processes. Collective."""
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32) if gradients else ()
    squares = torch.stack([*norms, torch.zeros((), device=device)]).square().sum()
    dist.all_reduce(squares)
    return squares

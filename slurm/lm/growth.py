"""The experts that a run adds between its stages."""

from collections.abc import Sequence

from alma.errors import UserError


def growth_of_steps(growth: Sequence[int], experts: int, stage_count: int) -> list[int]:
    """Number of experts added before each stage but the first, to `experts` of the first.

    growth: of --grow-experts, one number for all stages or one for each. UserError: it does not fit
    the number of stages, or more than doubles the experts.
    """
    steps = stage_count - 1
    text = f"--grow-experts {','.join(map(str, growth))}"
    if len(growth) not in (1, steps):
        counts = f"{len(growth)} growths given, but {stage_count} stages grow {steps} times"
        raise UserError(f"{text}: {counts}")
    added_experts = list(growth)
    if len(growth) == 1:
        added_experts = added_experts * steps
    for step, added in enumerate(added_experts, start=1):
        if added > experts:
            problem = f"growth {step} adds {added} to {experts} experts: at most double them"
            raise UserError(f"{text}: {problem}")
        experts += added
    return added_experts

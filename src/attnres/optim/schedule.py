"""Learning-rate schedules as a pure function of the step.

Nothing is carried from step to step, so a resumed run needs nothing but its step count to go on exactly. No step is
wasted on a rate of zero: the warm-up ends at its last step on the peak, and a decay would reach its floor one step
past the end of the run.
"""

import math

from attnres.optim.config import OptimConfig


def lr_multiplier(step: int, *, steps: int, config: OptimConfig) -> float:
    """What the peak learning rate is multiplied with at one optimizer step.

    Warm-up: ``(step + 1) / warmup_steps``. Then, with ``p`` the share of the decay that is over and ``m`` the floor
    (`OptimConfig.min_lr_ratio`): WSD ``1 - (1 - m) p`` over the last `OptimConfig.decay_fraction` of the run, and
    cosine ``m + (1 - m) (1 + cos(pi p)) / 2`` from the end of the warm-up on.

    Args:
        step: Optimizer steps already done.
        steps: Optimizer steps of the whole run.
        config: The schedule and its settings.

    Examples:
        >>> config = OptimConfig(schedule="wsd", warmup_steps=2, decay_fraction=0.4)
        >>> [round(lr_multiplier(step, steps=10, config=config), 2) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    floor = config.min_lr_ratio
    if config.schedule == "wsd":
        start = steps - decay_steps(steps, config)
        return 1.0 - (1.0 - floor) * _share(step, start, steps)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * _share(step, config.warmup_steps, steps)))


def decay_steps(steps: int, config: OptimConfig) -> int:
    """Number of optimizer steps at the end of a run over which WSD decays; 0 for the other schedules."""
    return round(config.decay_fraction * steps) if config.schedule == "wsd" else 0


def _share(step: int, start: int, stop: int) -> float:
    return min(max((step - start) / (stop - start), 0.0), 1.0) if stop > start else float(step >= stop)

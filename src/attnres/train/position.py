"""How far a run is: the part of its state that is plain numbers."""

from dataclasses import dataclass


@dataclass
class Position:
    """How far a run is."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Time spent on optimizer steps, without evaluations and checkpoints."""
    peak_memory_bytes: int = 0
    """Largest memory of earlier processes of this run."""

"""Conformance: the definition of Attention Residuals as checks that anyone can run on their own implementation.

An implementation is described by an `Adapter` of about twenty lines; `run` puts the checks to it. Importable without
the rest of the training code, and usable in other projects' tests.
"""

from attnres.testing.adapter import Adapter, Model, NotApplicable
from attnres.testing.definition import DEFINITIONS, INKLING_2, KIMI, Definition
from attnres.testing.golden import load as load_golden
from attnres.testing.outcome import Finding, Outcome
from attnres.testing.registry import CHECKS, Check
from attnres.testing.suite import Verdicts, run, select

__all__ = [
    "CHECKS",
    "DEFINITIONS",
    "INKLING_2",
    "KIMI",
    "Adapter",
    "Check",
    "Definition",
    "Finding",
    "Model",
    "NotApplicable",
    "Outcome",
    "Verdicts",
    "load_golden",
    "run",
    "select",
]

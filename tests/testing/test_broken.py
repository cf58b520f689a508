"""The suite finds faults: each broken implementation fails the checks that name its fault, and not those that do not.

The faults are those of public code, and more of their kinds.
"""

import pytest

from attnres.testing import CHECKS, run
from testing.broken_models import MODELS, DetachedHistory, adapter
from testing.broken_reads import READS, LacksKeyWeight, NormalisedValues, Scaled
from testing.broken_reads import MixesInPlace as ChangesItsInputs
from testing.plain import Plain

ABOUT_MODELS = ("schedule", "output", "init", "sites", "zero_query", "backward")
SINGLE_READ = {
    "value.score_scale", "value.softmax", "value.raw_values", "value.key_norm", "value.eps", "dtype.result",
    "dtype.mixed", "memory.inputs", "memory.strides", "memory.upstream", "locality.nan", "locality.nan_gradient",
    "determinism.gradient", "gradient.only_some",
}  # fmt: skip
"""Checks of a read that look at one thing: a fault in another leaves them alone."""
WHOLE_READS = {"schedule.reads", "schedule.batch", "schedule.no_gradient"}
SINGLE_MODEL = {
    name for name, check in CHECKS.items() if check.area in ("schedule", "output", "init", "sites", "zero_query")
} - WHOLE_READS | {"backward.state", "backward.given", "locality.model"}  # fmt: skip


def failures(broken, checks):
    return {outcome.check for outcome in run(broken, checks).failures}


def test_a_right_implementation_in_plain_pytorch_passes_every_check():
    verdicts = run(Plain())
    assert {outcome.status for outcome in verdicts.outcomes} == {"pass"}


@pytest.mark.parametrize("broken", READS, ids=lambda broken: broken.__name__)
def test_a_fault_of_a_read_is_named(broken):
    named = READS[broken]
    checks = [
        c for c in CHECKS.values() if c.area not in ABOUT_MODELS and c.name not in ("golden.schedule", "locality.model")
    ]
    found = failures(broken(), checks)
    assert named <= found
    if broken is not ChangesItsInputs:  # after which nothing compares
        assert found & SINGLE_READ == named & SINGLE_READ


@pytest.mark.parametrize("broken", MODELS, ids=lambda broken: broken.__name__)
def test_a_fault_of_a_model_is_named(broken):
    named = MODELS[broken]
    checks = [c for c in CHECKS.values() if c.area in ABOUT_MODELS or c.name in ("golden.schedule", "locality.model")]
    found = failures(adapter(broken), checks)
    assert named <= found
    # a fault that autograd itself refuses shows in every check with gradients
    assert found & SINGLE_MODEL - {"backward.state"} == named & SINGLE_MODEL - {"backward.state"}


def test_a_wrong_operator_leaves_the_checks_of_a_schedule_to_the_schedule():
    """What is wrong with a read shows in reads of a model too, but not in its parameters and state."""
    assert not failures(Scaled(), [CHECKS[name] for name in ("init.queries", "sites.own_query", "backward.state")])


def test_numbers_seen_say_what_the_formula_is_instead():
    def seen(broken, name):
        (outcome,) = run(broken, [CHECKS[name]]).outcomes
        return outcome.seen, outcome.expected

    assert seen(Scaled(), "value.score_scale") == (pytest.approx(0.125, abs=1e-3), 1.0)
    assert seen(NormalisedValues(), "value.raw_values") == (pytest.approx(0.05, abs=1e-3), pytest.approx(0.5))
    assert seen(LacksKeyWeight(), "value.key_weight") == ("no key weight", "one for each read")
    counts = {broken.__name__: seen(adapter(broken), "schedule.counts") for broken in MODELS}
    assert counts["EmbeddingTwice"] == ("1 E, 0.5 c0", "0.5 E, 0.5 c0")
    assert counts["ZeroPartial"] == ("0.5 E", "1 E")
    assert counts["NeverReset"][1] == "0.5 E, 0.5 c0+c1"
    assert counts["AverageOfBlock"] == ("0.5 E, 0.25 c0+c1", "0.5 E, 0.5 c0+c1")
    assert seen(adapter(DetachedHistory), "backward.history")[0] > 0.01


def test_every_check_fails_for_some_broken_implementation():
    """No check is idle; those of values as a whole fail along with any other."""
    reads = set().union(*(failures(broken(), CHECKS.values()) for broken in (NormalisedValues, Scaled)))
    named = reads.union(*READS.values(), *MODELS.values())
    idle = set(CHECKS) - named
    assert idle == set()

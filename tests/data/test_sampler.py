import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnres.data import Sampler, validation_windows
from attnres.errors import ConfigError, DataError

# Written down once; a change here means that old checkpoints would resume on other data.
GOLDEN = {0: [717, 307, 77, 507, 187, 257], 500: [900, 300, 240, 750, 180, 600]}


@st.composite
def samplers(draw) -> Sampler:
    num_tokens = draw(st.integers(2, 400))
    return Sampler(
        num_tokens,
        context=draw(st.integers(1, num_tokens - 1)),
        batch_size=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**64)),
    )


def fresh(sampler: Sampler) -> Sampler:
    return Sampler(sampler.num_tokens, context=sampler.context, batch_size=sampler.batch_size, seed=sampler.seed)


def epoch_windows(sampler: Sampler, epoch: int) -> np.ndarray:
    windows = sampler.windows_per_epoch
    first, stop = epoch * windows, (epoch + 1) * windows
    steps = range(first // sampler.batch_size, -(-stop // sampler.batch_size))
    drawn = np.concatenate([sampler.batch(step) for step in steps])
    skipped = steps.start * sampler.batch_size
    return drawn[first - skipped : stop - skipped]


@settings(deadline=None)
@given(sampler=samplers(), epoch=st.integers(0, 5))
def test_epoch_has_every_window_once_end_to_end_and_inside_the_shard(sampler, epoch):
    starts = np.sort(epoch_windows(sampler, epoch))
    assert starts.dtype == np.int64
    assert np.all(np.diff(starts) == sampler.context)
    assert starts[0] >= 0
    assert starts[-1] + sampler.context < sampler.num_tokens
    assert starts[0] < sampler.context or len(starts) == 1


@given(sampler=samplers())
def test_epoch_leaves_out_less_than_two_windows(sampler):
    assert sampler.num_tokens - sampler.windows_per_epoch * sampler.context <= 2 * sampler.context


@settings(deadline=None)
@given(sampler=samplers(), steps=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_batch_does_not_depend_on_what_was_drawn_before(sampler, steps):
    drawn = [sampler.batch(step) for step in steps]
    for step, batch in zip(steps, drawn, strict=True):
        np.testing.assert_array_equal(batch, fresh(sampler).batch(step))
        assert batch.shape == (sampler.batch_size,)


@settings(deadline=None)
@given(sampler=samplers(), before=st.integers(0, 20), after=st.integers(1, 20))
def test_resumed_run_continues_as_if_never_stopped(sampler, before, after):
    straight = [sampler.next_batch() for _ in range(before + after)]
    stopped, resumed = fresh(sampler), fresh(sampler)
    for _ in range(before):
        stopped.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    np.testing.assert_array_equal([resumed.next_batch() for _ in range(after)], straight[before:])
    assert resumed.state_dict() == sampler.state_dict()


def test_epochs_and_seeds_have_orders_of_their_own():
    sampler = Sampler(10_001, context=10, batch_size=100, seed=0)
    first, second = (epoch_windows(sampler, epoch) // 10 for epoch in (0, 1))
    other = epoch_windows(Sampler(10_001, context=10, batch_size=100, seed=1), 0) // 10
    for order in (second, other, np.sort(first)):
        assert np.mean(first == order) < 0.02


def test_offsets_reach_every_position_of_a_context():
    sampler = Sampler(100, context=7, batch_size=1, seed=3)
    assert {int(epoch_windows(sampler, epoch).min()) for epoch in range(150)} == set(range(7))


def test_every_window_is_first_about_equally_often():
    sampler = Sampler(60, context=10, batch_size=1, seed=0)
    firsts = [int(epoch_windows(sampler, epoch)[0]) // 10 for epoch in range(1000)]
    counts = np.bincount(firsts, minlength=5)
    assert sampler.windows_per_epoch == len(counts) == 5
    assert np.all(np.abs(counts - 200) < 60)  # 4.7 standard deviations


def test_order_is_the_same_on_every_machine_and_version():
    sampler = Sampler(1000, context=10, batch_size=6, seed=0)
    assert sampler.batch(0).tolist() == GOLDEN[0]
    assert sampler.batch(500).tolist() == GOLDEN[500]


def test_epoch_of_a_step_counts_windows():
    sampler = Sampler(100, context=10, batch_size=4, seed=0)
    assert sampler.windows_per_epoch == 9
    assert [sampler.epoch(step) for step in (0, 2, 3, 9)] == [0, 0, 1, 4]


def test_global_random_state_is_neither_read_nor_changed():
    np.random.seed(0)
    before = Sampler(1000, context=9, batch_size=3, seed=5).batch(400).tolist()
    expected = np.random.random(4)
    np.random.seed(0)
    assert Sampler(1000, context=11, batch_size=3, seed=5).batch(401).shape == (3,)
    np.testing.assert_array_equal(np.random.random(4), expected)
    assert Sampler(1000, context=9, batch_size=3, seed=5).batch(400).tolist() == before


@settings(deadline=None)
@given(num_tokens=st.integers(2, 300), data=st.data())
def test_validation_windows_are_ascending_apart_and_inside(num_tokens, data):
    context = data.draw(st.integers(1, num_tokens - 1))
    limit = data.draw(st.none() | st.integers(1, 50))
    starts = validation_windows(num_tokens, context, limit)
    available = (num_tokens - 1) // context
    assert len(starts) == (available if limit is None else min(limit, available)) > 0
    assert np.all(np.diff(starts) >= context)
    assert starts[0] == 0
    assert starts[-1] + context < num_tokens


def test_limited_validation_is_spread_over_the_shard():
    assert validation_windows(101, 10, 5).tolist() == [0, 20, 40, 60, 80]


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"context": 100}, DataError, "context is 100 tokens, but the shard has 100; allowed: at most 99"),
        ({"context": 0}, ConfigError, "context is 0 tokens; allowed: 1 or more"),
        ({"batch_size": 0}, ConfigError, "batch_size is 0; allowed: 1 or more"),
        ({"seed": -1}, ConfigError, "seed is -1; allowed: 0 or more"),
    ],
    ids=["context-too-long", "no-context", "empty-batch", "negative-seed"],
)
def test_bad_setting_is_refused(setting, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        Sampler(100, **{"context": 10, "batch_size": 2, "seed": 0, **setting})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 99}, "sampler state has num_tokens=99, but this run has num_tokens=100"),
        ({"batch_size": 3}, "sampler state has batch_size=3, but this run has batch_size=2"),
        ({"step": -1}, "sampler state has step=-1"),
        ({"seed": None}, "sampler state has seed=None"),
    ],
    ids=["other-shard", "other-batch", "negative-step", "no-seed"],
)
def test_state_of_another_sampler_is_refused_and_changes_nothing(change, message):
    sampler = Sampler(100, context=10, batch_size=2, seed=0)
    sampler.next_batch()
    with pytest.raises(ConfigError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), "step": 9, **change})
    assert sampler.step == 1


def test_state_without_a_position_is_refused():
    sampler = Sampler(100, context=10, batch_size=2, seed=0)
    state = sampler.state_dict()
    del state["step"]
    with pytest.raises(ConfigError, match="sampler state lacks step"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(("step", "limit"), [(-1, 1), (0, 0)], ids=["step", "limit"])
def test_negative_step_and_empty_limit_are_refused(step, limit):
    with pytest.raises(ConfigError, match="allowed"):
        Sampler(100, context=10, batch_size=2, seed=0).batch(step), validation_windows(100, 10, limit)

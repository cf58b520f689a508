import pytest

from attnres.errors import ConfigError
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm, reads
from attnres.residual.schedule import block_ends


def lines(num_sublayers, strategy):
    return [", ".join(map(str, sources)) for sources in reads(num_sublayers, strategy)]


@pytest.mark.parametrize(
    ("num_sublayers", "size", "expected"),
    [
        (6, 2, ["E", "E, c0", "E, c0+c1", "E, c0+c1, c2", "E, c0+c1, c2+c3", "E, c0+c1, c2+c3, c4",
                "E, c0+c1, c2+c3, c4+c5"]),
        (3, 1, ["E", "E, c0", "E, c0, c1", "E, c0, c1, c2"]),
        (5, 3, ["E", "E, c0", "E, c0+c1", "E, c0+..+c2", "E, c0+..+c2, c3", "E, c0+..+c2, c3+c4"]),
        (4, 8, ["E", "E, c0", "E, c0+c1", "E, c0+..+c2", "E, c0+..+c3"]),
    ],
    ids=["6-2", "3-1", "5-3", "4-8"],
)  # fmt: skip
def test_block_schedule_is_the_paper_s(num_sublayers, size, expected):
    assert lines(num_sublayers, BlockAttnRes(sublayers_per_block=size)) == expected


def test_prenorm_reads_one_growing_sum():
    assert lines(3, PreNorm()) == ["E", "E+c0", "E+c0+c1", "E+c0+..+c2"]


@pytest.mark.parametrize("num_sublayers", [1, 2, 5, 54])
def test_full_is_block_with_one_sublayer_per_block(num_sublayers):
    assert reads(num_sublayers, FullAttnRes()) == reads(num_sublayers, BlockAttnRes(sublayers_per_block=1))


@pytest.mark.parametrize("num_sublayers", [1, 2, 3, 5, 6, 26, 186])
@pytest.mark.parametrize(
    "strategy",
    [FullAttnRes()]
    + [BlockAttnRes(sublayers_per_block=s, remainder=r) for s in (1, 2, 3, 24, 999) for r in ("tail", "balanced")],
    ids=str,
)
def test_each_contribution_occurs_exactly_once_in_every_read(num_sublayers, strategy):
    for site, sources in enumerate(reads(num_sublayers, strategy)):
        assert [source.embedding for source in sources] == [True] + [False] * (len(sources) - 1)
        spread = [index for source in sources for index in range(source.first, source.stop)]
        assert spread == list(range(site))
        assert all(source.embedding or source.stop > source.first for source in sources)


def test_kimi_k3_has_nine_sources_at_the_output_and_a_tail_of_nine_layers():
    strategy = BlockAttnRes(sublayers_per_block=24)
    schedule = reads(186, strategy)
    assert len(schedule) == 187
    assert len(schedule[-1]) == 9
    assert schedule[-1][-1].stop - schedule[-1][-1].first == 18
    for layer in range(93):  # candidates as counted in the K3 report: before attention, before the MLP
        before_attention = len(schedule[2 * layer])
        assert before_attention == (1 if layer == 0 else -(-layer // 12) + 1)
        assert len(schedule[2 * layer + 1]) == layer // 12 + 2
    assert sum(map(len, schedule)) == 1003


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"sublayers_per_block": 3}, (3, 6, 7)),
        ({"sublayers_per_block": 3, "remainder": "balanced"}, (3, 5, 7)),
        ({"num_blocks": 2}, (4, 7)),
        ({"num_blocks": 3, "remainder": "balanced"}, (3, 5, 7)),
        ({"num_blocks": 7}, (1, 2, 3, 4, 5, 6, 7)),
        ({"sublayers_per_block": 7}, (7,)),
        ({"sublayers_per_block": 100}, (7,)),
        ({"num_blocks": 1}, (7,)),
    ],
    ids=str,
)
def test_blocks_of_seven_sublayers(arguments, expected):
    assert BlockAttnRes(**arguments).block_ends(7) == expected


def test_balanced_blocks_differ_by_at_most_one():
    for num_sublayers in range(1, 60):
        for num_blocks in range(1, num_sublayers + 1):
            ends = block_ends(num_sublayers, sublayers_per_block=None, num_blocks=num_blocks, remainder="balanced")
            lengths = [stop - start for start, stop in zip((0, *ends), ends, strict=False)]
            assert len(lengths) == num_blocks
            assert sum(lengths) == num_sublayers
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "sublayers_per_block is None and num_blocks is None; give exactly one"),
        ({"sublayers_per_block": 2, "num_blocks": 3}, "sublayers_per_block is 2 and num_blocks is 3"),
        ({"sublayers_per_block": 0}, "sublayers_per_block is 0; allowed is a whole number of 1 or more"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"sublayers_per_block": 2.5}, "sublayers_per_block is 2.5"),
        ({"sublayers_per_block": True}, "sublayers_per_block is True"),
        ({"num_blocks": 2, "remainder": "head"}, "remainder is 'head'; allowed are"),
        ({"num_blocks": 2, "read_scale": "max"}, "read_scale is 'max'; allowed are"),
    ],
    ids=str,
)
def test_a_contradictory_strategy_is_refused_when_it_is_made(arguments, message):
    with pytest.raises(ConfigError, match=message):
        BlockAttnRes(**arguments)


@pytest.mark.parametrize(
    ("num_sublayers", "num_blocks", "message"),
    [
        (4, 5, r"num_blocks is 5; allowed is 1 to 4"),
        (9, 4, r"9 sublayers in blocks of 3 make 3; use num_blocks=3 or remainder=\"balanced\""),
    ],
    ids=["too-many", "no-tail"],
)
def test_a_block_count_that_does_not_fit_the_depth_is_refused(num_sublayers, num_blocks, message):
    with pytest.raises(ConfigError, match=message):
        reads(num_sublayers, BlockAttnRes(num_blocks=num_blocks))


def test_a_model_without_sublayers_is_refused():
    with pytest.raises(ConfigError, match="num_sublayers is 0"):
        reads(0, FullAttnRes())

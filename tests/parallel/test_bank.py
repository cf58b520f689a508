"""The accounting of source memory gives the paper's example, and what is measured on a run, to the byte."""

import pytest

from attnres.errors import ConfigError
from attnres.parallel.bank import HeldSources, bank_bytes, held_sources, own_tokens
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from parallel.work_sequence import measure_bank

DIM, ELEMENT = 32, 8
PROMPT = {"blocks": 8, "tokens": 2**17, "dim": 7168, "element_bytes": 2}


def test_the_papers_example_comes_out():
    assert bank_bytes(**PROMPT) == 15_032_385_536
    assert bank_bytes(**PROMPT, tensor_ranks=8) == 1_879_048_192
    assert bank_bytes(**PROMPT, tensor_ranks=8, chunk=2**14) == 234_881_024


def test_tokens_are_divided_without_gap_or_overlap():
    for tokens in range(12):
        for ranks in range(1, 6):
            parts = [own_tokens(tokens, tensor_ranks=ranks, rank=rank) for rank in range(ranks)]
            assert [token for part in parts for token in part] == list(range(tokens))
            assert len(parts[0]) == max(map(len, parts))


def test_what_a_state_holds_is_what_a_read_sees():
    for strategy in (
        BlockAttnRes(sublayers_per_block=3),
        BlockAttnRes(num_blocks=4, remainder="balanced"),
        FullAttnRes(),
    ):
        for site in range(12):
            assert held_sources(strategy, 11, site).tensors == len(strategy.sources(site, 11))
    assert held_sources(BlockAttnRes(sublayers_per_block=3), 11, 11) == HeldSources(blocks=4, partial=False)


@pytest.mark.parametrize(
    ("ranks", "strategy", "tokens", "chunk", "batch"),
    [
        (2, BlockAttnRes(sublayers_per_block=3), 13, 5, 2),
        (4, BlockAttnRes(num_blocks=2), 13, 6, 1),
        (4, FullAttnRes(), 5, 3, 1),
    ],
    ids=["2 ranks", "4 ranks", "fewer tokens than ranks"],
)
def test_measured_bytes_are_the_formula_on_every_rank_site_and_chunk(processes, ranks, strategy, tokens, chunk, batch):
    layers = 4
    lengths = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    sizes = {"dim": DIM, "element_bytes": ELEMENT, "batch": batch, "tensor_ranks": ranks}
    blocks = len(strategy.block_ends(2 * layers))
    results = processes.run(ranks, measure_bank, strategy, tokens, chunk, batch, layers)
    for rank, (measured, largest, error) in enumerate(results):
        assert error < 1e-12
        held = [held_sources(strategy, 2 * layers, site) for site in range(2 * layers + 1)]
        assert measured == [
            [bank_bytes(**vars(at), tokens=length, rank=rank, **sizes) for at in held] for length in lengths
        ]
        peak = bank_bytes(blocks=blocks, embedding=True, tokens=tokens, chunk=chunk, rank=rank, **sizes)
        assert largest == peak
    whole = bank_bytes(blocks=blocks, embedding=True, tokens=tokens, chunk=chunk, **sizes | {"tensor_ranks": 1})
    assert sum(largest for _, largest, _ in results) == whole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"blocks": -1}, "blocks is -1; allowed is 0 or more"),
        ({"dim": 0}, "dim is 0; allowed is 1 or more"),
        ({"tensor_ranks": 0}, "tensor_ranks is 0; allowed is 1 or more"),
        ({"chunk": 0}, "chunk is 0; allowed is 1 or more"),
        ({"rank": 1}, "rank is 1; allowed is 0 to 0"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong, message):
    with pytest.raises(ConfigError) as caught:
        bank_bytes(**PROMPT | wrong)
    assert str(caught.value) == message


def test_strategies_without_sources_and_sites_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match="PreNorm keeps no sources"):
        held_sources(PreNorm(), 4, 0)
    with pytest.raises(ConfigError, match="site is 5; allowed is 0 to 4"):
        held_sources(FullAttnRes(), 4, 5)

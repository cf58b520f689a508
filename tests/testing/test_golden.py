"""Golden vectors: what the files hold is what the definition gives, and what plain Python gives without torch."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from attnres.testing.golden import FOLDER, INDEX, load
from attnres.testing.golden.make import make


def test_the_files_are_what_the_maker_makes(tmp_path):
    make(tmp_path)
    assert (tmp_path / INDEX).read_bytes() == (FOLDER / INDEX).read_bytes()
    for name in ("reads", "merges", "schedules"):
        made, kept = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path, FOLDER))
        assert made.keys() == kept.keys()
        for key, tensor in made.items():
            assert tensor.dtype == torch.float64
            torch.testing.assert_close(tensor, kept[key], rtol=1e-12, atol=1e-12, msg=key)


def test_the_files_are_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.suffix != ".py") < 200_000


def test_inputs_are_the_same_numbers_in_float32():
    inputs = ("sources", "query", "key_weight", "upstream", "partial", "finished", "embedding", "matrices", "queries")
    for name in ("reads", "merges", "schedules"):
        for key, tensor in load_file(FOLDER / f"{name}.safetensors").items():
            if key.partition("/")[2] in inputs:
                assert torch.equal(tensor.float().double(), tensor), key


@pytest.mark.parametrize(
    "case", [case for case in load().reads if case.definition == "kimi"], ids=lambda case: case.name
)
def test_a_read_in_plain_python(case):
    dim = case.query.shape[0]
    rows = [source.reshape(-1, dim).tolist() for source in case.sources]
    query, weight = case.query.tolist(), case.key_weight.tolist()
    for token, expected in enumerate(case.value.reshape(-1, dim).tolist()):
        values = [row[token] for row in rows]
        keys = [[v / math.sqrt(math.fsum(x * x for x in value) / dim + case.eps) for v in value] for value in values]
        scores = [math.fsum(k * g * q for k, g, q in zip(key, weight, query, strict=True)) for key in keys]
        powers = [math.exp(score - max(scores)) for score in scores]
        shares = [power / math.fsum(powers) for power in powers]
        mixed = [math.fsum(s * value[at] for s, value in zip(shares, values, strict=True)) for at in range(dim)]
        assert mixed == pytest.approx(expected, rel=1e-12, abs=1e-12 * max(map(abs, expected)))
        lse = case.lse.flatten()[token].item()
        assert math.log(math.fsum(powers)) + max(scores) == pytest.approx(lse, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("case", load().merges, ids=lambda case: case.name)
def test_a_merge_is_the_sum_of_its_phases(case):
    total = torch.logaddexp(case.finished_lse, case.partial_lse)
    share = torch.exp(case.partial_lse - total).unsqueeze(-1)
    torch.testing.assert_close(total, case.lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        (1 - share) * case.finished_mixed + share * case.partial, case.value, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("case", load().schedules, ids=lambda case: case.name)
def test_members_say_what_a_read_is_made_of(case):
    """Each output and the embedding exactly once, and the reads follow from the members alone."""
    outputs = [case.matrices[at] @ case.reads[at].unsqueeze(-1) for at in range(len(case.matrices))]
    everything = [*(output.squeeze(-1) for output in outputs), case.embedding]
    for site, sources in enumerate(case.members):
        assert sorted(at for source in sources for at in source) == list(range(-1, site))
        values = torch.stack([sum(everything[at] for at in source) for source in sources])
        keys = values / (values.square().mean(-1, keepdim=True) + case.eps).sqrt() * case.key_weights[site]
        weights = (keys @ case.queries[site]).softmax(0)
        torch.testing.assert_close((weights.unsqueeze(-1) * values).sum(0), case.reads[site], rtol=1e-12, atol=1e-12)


def test_the_index_describes_itself():
    index = json.loads((FOLDER / INDEX).read_text())
    assert (index["format"], index["dtype"]) == (1, "float64")
    assert all(case["about"] for case in index["reads"] + index["merges"])

"""What a read allocates and keeps: references to its sources, and numbers per token and source, never a copy."""

from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from attnres.bench.live import peak_bytes, saved_by
from attnres.models import build
from attnres.ops import depth_attention, inter_block, intra_block
from attnres.ops.backends import resolve
from attnres.ops.two_phase import NearSettings, carrier, look_ahead, read_near
from attnres.residual import BlockAttnRes, PreNorm

pytestmark = pytest.mark.skipif(resolve("auto", [torch.ones(2, 2)]) == "reference", reason="needs the CPU kernel")

CPU = torch.device("cpu")
EPS = 1e-6
SOURCES, TOKENS, DIM = 7, 48, 256
DTYPES = [torch.float32, torch.bfloat16]
PER_SOURCE_AND_TOKEN = 2
"""Float32 numbers a read may keep or need for each source of each token."""
SMALL = 32 * 4 * 4 * DIM
"""Bytes for what has no tokens: vectors, and single numbers."""


def leaves(dtype, sources=SOURCES, tokens=TOKENS, reads=1):
    torch.manual_seed(0)
    values = [torch.randn(tokens, DIM).to(dtype).requires_grad_() for _ in range(sources)]
    vectors = [torch.randn(reads, DIM).to(dtype).requires_grad_() for _ in range(2)]
    return values, *vectors


def numbers(sources=SOURCES, tokens=TOKENS, per=PER_SOURCE_AND_TOKEN):
    return 4 * per * sources * tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_a_direct_read_saves_references_and_numbers_per_token(dtype, scale):
    values, query, weight = leaves(dtype)
    query, weight = query[0].detach().requires_grad_(), weight[0].detach().requires_grad_()
    saved = saved_by(lambda: depth_attention(values, query, weight, out_scale=scale), [*values, query, weight])
    assert saved.bytes <= numbers()
    assert saved.largest <= SOURCES * TOKENS
    saved = saved_by(
        lambda: depth_attention(values, query, weight, return_weights=True, return_lse=True).mixed,
        [*values, query, weight],
    )
    assert saved.bytes <= numbers()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("near", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_near_read_saves_near_sources_its_own_result_and_numbers_per_token(dtype, near, deferred):
    values, queries, weights = leaves(dtype, reads=4)
    carriers = [carrier(value) for value in values]
    settings = {"eps": EPS, "dtype": dtype, "deferred": deferred}
    ahead, _ = look_ahead(values, carriers, queries, weights, **settings)
    near_values, query, weight = leaves(dtype, sources=near)
    query, weight = query[0].detach().requires_grad_(), weight[0].detach().requires_grad_()
    results = []

    def read():
        far = values if deferred else ()
        result = read_near(ahead[0], far, near_values, query, weight, NearSettings(EPS, 1.0, dtype))
        results.append(result)
        return result

    inputs = [*values, *near_values, query, weight]
    saved = saved_by(read, inputs)
    assert saved.largest <= TOKENS * DIM  # its own result, which the sublayer's norm keeps as well
    assert saved.bytes <= TOKENS * DIM * dtype.itemsize + numbers(SOURCES + near)
    assert results[0].requires_grad
    if not near:
        assert saved.largest <= TOKENS


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_phase_1_saves_references_and_vectors(dtype, deferred):
    values, queries, weights = leaves(dtype, reads=4)

    def ahead():
        carriers = [carrier(value) for value in values]
        return look_ahead(values, carriers, queries, weights, eps=EPS, dtype=dtype, deferred=deferred)

    saved = saved_by(ahead, [*values, queries, weights])
    assert saved.bytes == 0


def test_a_carrier_has_no_memory_and_a_deferred_phase_1_next_to_none():
    values, queries, weights = leaves(torch.bfloat16, tokens=512, reads=8)
    assert peak_bytes(lambda: [carrier(value) for value in values], CPU) <= SMALL
    carriers = [carrier(value) for value in values]
    settings = {"eps": EPS, "dtype": torch.bfloat16}
    deferred = peak_bytes(lambda: look_ahead(values, carriers, queries, weights, **settings, deferred=True), CPU)
    assert deferred <= SMALL
    ahead = peak_bytes(lambda: look_ahead(values, carriers, queries, weights, **settings, deferred=False), CPU)
    assert 8 * 4 * 512 * DIM <= ahead <= 8 * 4 * 512 * (DIM + SOURCES * PER_SOURCE_AND_TOKEN) + SMALL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 1024])
def test_a_read_for_inference_allocates_its_result_and_numbers_per_token(dtype, tokens):
    """The reproducer of a bank read twice over in float32, scaled down: 9 sources, no gradient."""
    values, query, weight = leaves(dtype, 9, tokens)
    output = tokens * DIM * dtype.itemsize
    for read in (
        lambda: depth_attention(values, query[0], weight[0]),
        lambda: depth_attention(values, query[0], weight[0], out_scale=9.0, return_weights=True),
    ):
        with torch.no_grad():
            read()
            peak = peak_bytes(read, CPU)
        assert output <= peak <= output + numbers(9, tokens) + SMALL
    with torch.no_grad():
        phase_1 = inter_block(values[:8], query, weight)
        part = type(phase_1)(phase_1.mixed[0], phase_1.lse[0])
        peak = peak_bytes(lambda: intra_block(part, values[8], query[0], weight[0]), CPU)
    assert output <= peak <= output + numbers(9, tokens) + SMALL


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_backward_allocates_the_gradients_and_numbers_per_token(dtype):
    values, query, weight = leaves(dtype, tokens=1024)
    query, weight = query[0].detach().requires_grad_(), weight[0].detach().requires_grad_()
    out = depth_attention(values, query, weight)
    grad = torch.randn_like(out)
    inputs = [*values, query, weight]
    peak = peak_bytes(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), CPU)
    grads = SOURCES * 1024 * DIM * dtype.itemsize
    assert grads <= peak <= grads + numbers(tokens=1024) + SMALL


# Whole models. The unit is one tensor of a hidden state; what grows with depth under PreNorm as well (the inputs that
# the checkpoints keep) is in the difference once.

BLOCKS, WIDTH, CONTEXT = 4, 32, 64


@cache
def peak(strategy, layers):
    """Of one training step with every layer checkpointed, the gradients of parameters being there already."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = build(config, strategy, dtype=torch.float32).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 64, (1, CONTEXT))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    return peak_bytes(step, CPU) / (4 * CONTEXT * WIDTH)


def over(layers, phases, blocks=BLOCKS):
    """Peak above PreNorm and above the finished sources: the embedding and the blocks."""
    strategy = BlockAttnRes(num_blocks=blocks, phases=phases)
    return peak(strategy, layers) - peak(PreNorm(), layers) - (blocks + 1)


@pytest.mark.parametrize("layers", [8, 16, 32])
def test_one_phase_training_peaks_above_prenorm_by_its_sources_and_a_constant(layers):
    assert over(layers, "one") <= 2


@pytest.mark.parametrize("layers", [8, 16, 32])
def test_auto_keeps_the_gradients_of_one_blocks_reads_besides(layers):
    """They wait for the backward of phase 1, in place of checkpoints that are used up by then: a part of them counts.

    Nothing is kept for each layer of the model, only for each read of one block.
    """
    reads = 2 * layers // BLOCKS
    assert over(layers, "auto") <= 2 + reads / 2


@pytest.mark.parametrize("blocks", [4, 8, 16])
def test_auto_keeps_float32_gradients_of_the_finished_sources_twice_at_most(blocks):
    """The backward of a phase 1 makes new ones while those it was given are still there."""
    assert over(2 * blocks, "auto", blocks) <= 2 * (blocks + 1)


@pytest.mark.parametrize("layers", [8, 16, 32])
def test_two_phases_keep_phase_1_of_every_block_besides(layers):
    """That is what ``phases="two"`` costs under checkpointing: the results of phase 1, a float32 tensor for each read,
    are part of the state, and a checkpoint keeps the state. It is to be had where memory is not scarce."""
    reads = 2 * layers * (BLOCKS - 1) // BLOCKS  # the first block has none
    assert reads / 2 <= over(layers, "two") <= reads + 2 + 2 * layers / BLOCKS

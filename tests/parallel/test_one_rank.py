"""A pipeline of several stages on a single rank, on every device that is here: no hop leaves the rank."""

import copy

import pytest
import torch
import torch.distributed as dist

from attnres.parallel.pipeline import Pipeline
from parallel.work_pipeline import Case, batches, cross_entropy, evaluation_batch, small_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request, tmp_path):
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["interleaved1f1b", "interleavedzerobubble", "zbv"])
def test_several_stages_on_one_rank_are_the_model(device, schedule):
    case = Case(schedule=schedule, virtual=2)
    model = small_model(case)
    whole = copy.deepcopy(model).to(device)
    pipeline = Pipeline(model, microbatches=4, schedule=schedule, virtual=2, device=device)
    loss = pipeline.step(batches(case), cross_entropy)
    total = 0.0
    for inputs, targets in batches(case):
        part = cross_entropy(whole(input_ids=inputs.to(device), use_cache=False).logits, targets.to(device)) / 4
        part.backward()
        total += part.detach()
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    for module in pipeline.modules:
        for name, parameter in module.named_parameters():
            assert parameter.device.type == device
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-13)
    assert pipeline.ledger.rows == []
    pipeline.train(False)
    inputs, targets = evaluation_batch(3)
    with torch.no_grad():
        expected = cross_entropy(whole.eval()(input_ids=inputs.to(device), use_cache=False).logits, targets.to(device))
    torch.testing.assert_close(pipeline.evaluate(inputs, targets, cross_entropy), expected, rtol=1e-12, atol=0)

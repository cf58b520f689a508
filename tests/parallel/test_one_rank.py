"""A pipeline of several stages on a single rank, on every device that is here: no hop leaves the rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from attnres.parallel.pipeline import Pipeline
from attnres.parallel.tensor import parallelize
from parallel.work_pipeline import Case, batches, cross_entropy, evaluation_batch, small_model
from parallel.work_sequence import full

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request, tmp_path):
    backend = {"cpu": "gloo", "cuda": "nccl"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("divided", [False, True], ids=["whole", "parallelized"])
@pytest.mark.parametrize("schedule", ["interleaved1f1b", "interleavedzerobubble", "zbv"])
def test_several_stages_on_one_rank_are_the_model(device, schedule, divided):
    """Also where the model went through all exchanges between tensor ranks, of which there is one."""
    case = Case(schedule=schedule, virtual=2)
    model = small_model(case)
    whole = copy.deepcopy(model).to(device)
    handle = parallelize(model, init_device_mesh(device, (1,))) if divided else None
    pipeline = Pipeline(model, microbatches=4, schedule=schedule, virtual=2, device=device)
    loss = pipeline.step(batches(case), cross_entropy)
    if handle is not None:
        handle.sum_gradients()
    total = 0.0
    for inputs, targets in batches(case):
        part = cross_entropy(whole(input_ids=inputs.to(device), use_cache=False).logits, targets.to(device)) / 4
        part.backward()
        total += part.detach()
    torch.testing.assert_close(loss, total, rtol=1e-12, atol=0)
    for module in pipeline.modules:
        for name, parameter in module.named_parameters():
            assert parameter.device.type == device
            found, expected = full(parameter.grad), whole.get_parameter(name).grad
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    assert pipeline.ledger.rows == []
    pipeline.train(False)
    inputs, targets = evaluation_batch(3)
    with torch.no_grad():
        expected = cross_entropy(whole.eval()(input_ids=inputs.to(device), use_cache=False).logits, targets.to(device))
    torch.testing.assert_close(pipeline.evaluate(inputs, targets, cross_entropy), expected, rtol=1e-12, atol=0)

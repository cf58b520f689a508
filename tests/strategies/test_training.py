import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from attnres.experiments.models import build_model
from attnres.experiments.presets import tiny
from attnres.experiments.run import run
from attnres.models import build
from attnres.residual import STRATEGIES
from attnres.train import load_weights
from strategies.cases import SETTINGS, case_id, cases

FIRST = [cls(**SETTINGS.get(name, [{}])[0]) for name, cls in STRATEGIES.items()]
"""Each strategy once."""
IDS = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(0))


def small_run(data, strategy, **train):
    base = tiny()
    model = replace(
        base.model, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    settings = {"steps": 30, "batch_size": 4, "eval_every": 30, "eval_sequences": 8, "checkpoint_every": 30,
                "precision": "fp32", "threads": 1}  # fmt: skip
    return replace(
        base,
        model=model,
        residual=strategy,
        data=replace(base.data, dataset=str(data.folder), vocab_size=data.vocab_size, context=32),
        optim=replace(base.optim, optimizer="adamw", lr=1e-2, warmup_steps=3, schedule="constant"),
        train=replace(base.train, **{**settings, **train}),
    )


def metrics(folder, kind):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def final_weights(config, folder):
    model = build_model(config)
    load_weights(model, folder)
    return model.state_dict()


@pytest.mark.parametrize("strategy", FIRST, ids=case_id)
def test_trains_on_real_text_and_resumes_bitwise(strategy, novel, tmp_path):
    """One run of 30 steps with every layer recomputed; and 15 steps, saved, read back, and 15 more."""
    config = small_run(novel, strategy, activation_checkpointing="reentrant")
    result = run(config, tmp_path / "whole", progress=False)
    rows = metrics(tmp_path / "whole", "train")
    assert result["valid_loss"] < metrics(tmp_path / "whole", "valid")[0]["loss"] - 0.5
    assert all(math.isfinite(row["grad_norm"]) for row in rows)
    run(replace(config, train=replace(config.train, steps=15)), tmp_path / "parts", progress=False)
    run(config, tmp_path / "parts", resume=True, progress=False)
    assert [row["loss"] for row in metrics(tmp_path / "parts", "train")] == [row["loss"] for row in rows]
    expected = final_weights(config, tmp_path / "whole")
    for name, value in final_weights(config, tmp_path / "parts").items():
        assert torch.equal(value, expected[name]), name
    depth = json.loads((tmp_path / "whole" / "depth.json").read_text())
    assert len(depth["mixing_matrix"]) == 9


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_recomputed_layers_give_the_same_gradients(strategy, use_reentrant, novel):
    model = scrambled(strategy, novel).train()
    expected, expected_gradients = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    loss, found = gradients(model)
    assert torch.equal(loss, expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


def gradients(model, *, forward=None, autocast=False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = (model if forward is None else forward)(input_ids=IDS, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), IDS.flatten())
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def scrambled(strategy, novel):
    model = build_model(small_run(novel, strategy))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.base_model.residual.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_every_parameter_gets_a_finite_gradient_in_float32_and_under_bf16_autocast(strategy, novel):
    model = scrambled(strategy, novel)
    expected, found = gradients(model)
    for name, gradient in found.items():
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name
    loss, found = gradients(model, autocast=True)
    assert abs(loss - expected) < 0.2
    for name, gradient in found.items():
        assert gradient is not None, name
        assert torch.isfinite(gradient).all(), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize("strategy", FIRST, ids=case_id)
def test_compiles_without_a_graph_break_and_computes_the_same(strategy, novel):
    model = scrambled(strategy, novel)
    expected, expected_gradients = gradients(model)
    torch._dynamo.reset()
    loss, found = gradients(model, forward=torch.compile(model, fullgraph=True, backend="eager"))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_settings_survive_json(strategy, novel):
    config = small_run(novel, strategy)
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("strategy", cases(), ids=case_id)
def test_a_model_is_built_again_from_the_config_it_saved(strategy, novel, tmp_path):
    model = build_model(small_run(novel, strategy))
    model.config.save_pretrained(tmp_path)
    again = build(AutoConfig.from_pretrained(tmp_path), strategy)
    assert {name: value.shape for name, value in again.state_dict().items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from attnres.train import Evaluator
from attnres.train.forward import build_eval_loss, build_loss
from train.tiny_run import CONTEXT, tiny_config, tiny_data, tiny_model


def evaluator(model: LlamaForCausalLM | None = None, *, sequences: int = 6, batch_size: int = 2) -> Evaluator:
    model = tiny_model().train() if model is None else model
    return Evaluator(
        model,
        build_loss(model, tiny_config().train),
        tiny_data().split("valid"),
        context=CONTEXT,
        sequences=sequences,
        batch_size=batch_size,
        device="cpu",
    )


def test_the_loss_is_the_mean_over_all_tokens_of_the_windows() -> None:
    ours = evaluator()
    tokens = torch.from_numpy(np.array(tiny_data().split("valid").tokens, dtype=np.int64))
    model = tiny_model().eval()
    losses = []
    for start in ours.starts:
        window = tokens[start : start + CONTEXT + 1]
        losses.append(F.cross_entropy(model(input_ids=window[None, :-1]).logits[0], window[1:]).item())
    found = ours()
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) / 3.0)


def test_the_batch_size_does_not_change_the_loss() -> None:
    losses = [evaluator(batch_size=batch_size)().loss for batch_size in (1, 4, 6)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_an_evaluation_draws_no_dropout_and_gives_the_same_number_twice() -> None:
    ours = evaluator()
    state = torch.get_rng_state()
    assert ours() == ours()
    assert torch.equal(torch.get_rng_state(), state)


def test_an_evaluation_leaves_each_module_in_its_own_mode() -> None:
    model = tiny_model().train()
    model.model.layers[0].eval()
    seen: list[bool] = []
    model.lm_head.register_forward_pre_hook(lambda module, given: seen.append(model.training))
    before = {name: module.training for name, module in model.named_modules()}
    ours = evaluator(model)
    ours()
    assert seen == [False] * 3
    assert {name: module.training for name, module in model.named_modules()} == before
    assert len(set(before.values())) == 2


def test_asking_for_more_windows_than_there_are_takes_them_all() -> None:
    assert len(evaluator(sequences=1000).starts) == 119 // CONTEXT


def test_an_evaluation_may_have_a_precision_of_its_own() -> None:
    model = tiny_model().eval()
    batch = next(evaluator().batches())
    trained_in_bf16 = tiny_config(precision="bf16", eval_precision="fp32").train
    exact, rounded = build_loss(model, tiny_config().train)(*batch), build_loss(model, trained_in_bf16)(*batch)
    assert build_eval_loss(model, trained_in_bf16)(*batch) == exact
    assert rounded != exact
    assert build_eval_loss(model, tiny_config(precision="bf16").train)(*batch) == rounded

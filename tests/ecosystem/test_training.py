"""Converted models in Transformers' Trainer, Accelerate and PEFT."""

import copy

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from attnres.models import convert
from attnres.residual import BlockAttnRes
from ecosystem.checkpoints import learned, saved
from models.small import make

pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")  # in PEFT


def rows(count=12, length=10):
    torch.manual_seed(0)
    ids = torch.randint(3, 96, (count, length))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_steps": 2,
        "disable_tqdm": True,
        "logging_steps": 1,
        "seed": 1,
    }
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_saves_and_resumes(checkpointing, tmp_path):
    model = learned()
    before = copy.deepcopy(model.state_dict())
    options = arguments(tmp_path, activation_checkpointing=checkpointing)
    trainer = Trainer(model=model, args=options, train_dataset=rows())
    trainer.train()
    query = "model.residual.sites.3.pseudo_query"
    assert not torch.equal(model.state_dict()[query], before[query])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    fresh = learned()
    again = Trainer(model=fresh, args=options, train_dataset=rows())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in fresh.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_trainer_evaluates_and_learns(tmp_path):
    model = convert(make("llama"), BlockAttnRes(sublayers_per_block=3))
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, max_steps=30, save_strategy="no"),
        train_dataset=rows(4),
        eval_dataset=rows(4),
    )
    start = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * start


def test_accelerate_prepares_and_steps(tmp_path):
    model = learned()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=4))
    losses = []
    for _ in range(5):
        for batch in loader:
            loss = prepared(**batch, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    accelerator.save_model(prepared, tmp_path)
    unwrapped = accelerator.unwrap_model(prepared)
    unwrapped.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(value, unwrapped.state_dict()[name]) for name, value in loaded.state_dict().items())


def lora(**changes):
    options = {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["residual"]}
    return LoraConfig(task_type="CAUSAL_LM", **{**options, **changes})


def test_lora_trains_the_queries_as_modules_to_save(tmp_path):
    model = saved(tmp_path / "base")
    ids = torch.stack([row["input_ids"] for row in rows(4)])
    frozen = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(ids).logits
    wrapped = get_peft_model(model, lora())
    assert torch.equal(wrapped(ids).logits, expected)
    trained = {name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    assert sum("residual.modules_to_save.default.sites" in name for name in trained) == 14
    assert all("lora_" in name or "residual.modules_to_save" in name for name in trained)
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(15):
        loss = wrapped(ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad and "sites.3.pseudo" in n}
        assert all(grad is not None and bool((grad != 0).any()) for grad in grads.values())
        assert grads
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = wrapped(ids).logits
    with wrapped.disable_adapter():
        torch.testing.assert_close(wrapped(ids).logits, expected)
    wrapped.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(ids).logits, wrapped.eval()(ids).logits, rtol=1e-5, atol=1e-5)
    assert not torch.equal(after, expected)
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, wrapped(ids).logits, rtol=1e-4, atol=1e-4)
    assert set(merged.state_dict()) == set(frozen)
    with torch.no_grad():  # the reads that fuse the norm see the adapter's queries, too
        torch.testing.assert_close(merged(ids).logits, wrapped(ids).logits, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(again(ids).logits, merged(ids).logits)


def test_lora_generates(tmp_path):
    wrapped = get_peft_model(learned(), lora()).eval()
    ids = torch.randint(3, 96, (1, 5))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(wrapped.generate(input_ids=ids, **options), learned().generate(ids, **options))

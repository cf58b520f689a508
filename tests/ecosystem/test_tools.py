"""lm-eval and torch.export on converted models."""

import json
import math

import pytest
import torch

from attnres.residual import BlockAttnRes, FullAttnRes
from ecosystem.checkpoints import learned, saved

TASK = """
task: local_words
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {file}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""
ITEMS = [
    {"text": "the quick brown", "choices": ["fox", "dog"], "answer": 0},
    {"text": "runs away from the", "choices": ["slow", "cat"], "answer": 0},
    {"text": "over the lazy", "choices": ["the", "dog"], "answer": 1},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_runs_its_hf_model_on_a_local_task(tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = saved(tmp_path / "model")
    (tmp_path / "tasks").mkdir()
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (tmp_path / "tasks" / "local_words.yaml").write_text(TASK.format(file=items))
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model"), "dtype": "float32"},
        tasks=["local_words"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert results is not None
    samples = results["samples"]["local_words"]
    assert len(samples) == len(ITEMS)
    ours = [[_log_likelihood(model, item["text"], f" {choice}") for choice in item["choices"]] for item in ITEMS]
    for sample, expected in zip(sorted(samples, key=lambda sample: sample["doc_id"]), ours, strict=True):
        seen = [float(response[0]) for response in sample["filtered_resps"]]
        assert seen == pytest.approx(expected, abs=1e-3)
        assert all(math.isfinite(value) for value in seen)


def _log_likelihood(model, context, continuation):
    from ecosystem.checkpoints import tokenizer

    words = tokenizer()
    whole = words(context + continuation, return_tensors="pt").input_ids
    start = len(words(context).input_ids)
    with torch.no_grad():
        log_probabilities = model(whole).logits.log_softmax(-1)
    return sum(log_probabilities[0, at - 1, whole[0, at]].item() for at in range(start, whole.shape[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes(sublayers_per_block=3)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("grad", [False, True])
def test_export_gives_a_program_that_computes_the_same(family, strategy, grad, tmp_path):
    model, ids = learned(family, strategy), torch.randint(3, 96, (2, 8))
    with torch.set_grad_enabled(grad):
        program = torch.export.export(
            model,
            (),
            {"input_ids": ids, "use_cache": False},
            dynamic_shapes={"input_ids": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, "use_cache": None},
            strict=False,
        )
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for shape in ((2, 8), (3, 5)):
            other = torch.randint(3, 96, shape)
            actual = loaded(input_ids=other, use_cache=False).logits
            torch.testing.assert_close(actual, model(other, use_cache=False).logits, rtol=1e-4, atol=1e-5)

"""A run as a Hugging Face folder."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.cli import main
from attnres.data import byte_tokenizer, prepare
from attnres.experiments.generation import continue_prompts, load_text_model
from attnres.experiments.models import build_model, record_end_of_text
from attnres.experiments.run import run
from attnres.experiments.trained import load_trained
from attnres.residual import BlockAttnRes
from attnres.train import ModelConfig
from experiments.runs import dataset, small_run, text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    config = small_run(dataset(folder))
    run(replace(config, residual=BlockAttnRes(sublayers_per_block=2)), folder / "run", progress=False)
    return folder / "run"


def test_a_run_becomes_a_folder_that_transformers_loads(trained, tmp_path, capsys):
    main(["export", str(trained), str(tmp_path / "model")])
    assert "model: exported from" in capsys.readouterr().out
    loaded, own = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), load_trained(trained)
    state = own.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words("It was").input_ids == own.tokenizer.encode("It was").ids
    assert words.decode(words("It was").input_ids) == "It was"
    main(["generate", str(tmp_path / "model"), "--prompt", "It was", "--max-new-tokens", "3"])
    capsys.readouterr()
    main(["unconvert", str(tmp_path / "model"), str(tmp_path / "plain"), "--allow-change"])
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "{run}", "{run}"), "exists already; allowed is a new folder"),
        (("export", "{run}", "{out}", "--kind", "fla"), "is a run folder; allowed is hugging-face, and then fla"),
        (("export", "{none}", "{out}", "--kind", "hugging-face"), "none is not a run folder"),
        (
            ("report", "{model}"),
            "model is a Hugging Face folder (config.json has a model_type); allowed is a run folder",
        ),
        (("eval", "{model}"), "model is a Hugging Face folder"),
    ],
)
def test_what_cannot_be_exported_or_is_no_run_is_refused(arguments, message, trained, tmp_path, capsys):
    load_trained(trained).model.save_pretrained(tmp_path / "model")
    before = sorted(path.name for path in (tmp_path / "model").iterdir())
    names = {"run": trained, "out": tmp_path / "out", "none": tmp_path / "none", "model": tmp_path / "model"}
    with pytest.raises(SystemExit) as stop:
        main([argument.format(**names) for argument in arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == before


END = 256


def bytes_that_end_last(name):
    """A tokenizer of bytes whose last token is the end of text, under a name of one's own."""
    description = json.loads(byte_tokenizer().to_str())
    first, *symbols = sorted(description["model"]["vocab"], key=description["model"]["vocab"].get)
    del first
    description["model"]["vocab"] = {symbol: index for index, symbol in enumerate([*symbols, name])}
    return Tokenizer.from_str(json.dumps(description))


@pytest.fixture(scope="module")
def ends_last(tmp_path_factory):
    """A run on a dataset with such a tokenizer."""
    folder = tmp_path_factory.mktemp("ends")
    bytes_that_end_last("</s>").save(str(folder / "tokenizer.json"))
    for split, words in (("train", 600), ("valid", 200)):
        (folder / f"{split}.txt").write_text(text(words, 1))
    data = prepare(
        folder / "data",
        train=[folder / "train.txt"],
        valid=[folder / "valid.txt"],
        tokenizer_file=folder / "tokenizer.json",
    )
    run(small_run(data, steps=2), folder / "run", progress=False)
    return folder / "run"


def test_a_model_from_scratch_says_that_a_text_ends_where_its_tokenizer_does(trained, ends_last, tmp_path):
    for folder, end in ((trained, 0), (ends_last, END)):
        main(["export", str(folder), str(tmp_path / str(end))])
        for model in (load_trained(folder).model, AutoModelForCausalLM.from_pretrained(tmp_path / str(end))):
            assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (end, end)
        assert AutoTokenizer.from_pretrained(tmp_path / str(end)).eos_token_id == end


def test_a_model_whose_tokenizer_has_no_end_of_text_has_none_either(ends_last, tmp_path):
    config = load_trained(ends_last).config
    for settings, expected in ((config.model, None), (replace(config.model, pretrained="elsewhere"), END)):
        model = build_model(config)
        record_end_of_text(model, ModelConfig(), bytes_that_end_last("</s>"))
        record_end_of_text(model, settings, bytes_that_end_last("nothing of the kind"))
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert (loaded.config.eos_token_id, loaded.generation_config.eos_token_id) == (expected, expected)


def test_generation_ends_at_the_tokenizers_own_end_of_text_and_at_no_other_token(ends_last):
    words = load_text_model(ends_last)
    torch.nn.init.zeros_(words.model.lm_head.weight)  # so that the likeliest token is the first one
    greedy = {"max_new_tokens": 4, "temperature": 0.0, "top_k": 1, "seed": 0}
    assert continue_prompts(words, ["it was"], **greedy) == ["it was" + 4 * "\0"]

    def end_first_row(module, given, logits):
        logits[0, :, END] = 1.0
        return logits

    words.model.lm_head.register_forward_hook(end_first_row)
    assert continue_prompts(words, ["it was", "he had"], **greedy) == ["it was", "he had" + 4 * "\0"]

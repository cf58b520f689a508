"""A run as a Hugging Face folder."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.cli import main
from attnres.experiments.run import run
from attnres.experiments.trained import load_trained
from attnres.residual import BlockAttnRes
from experiments.runs import dataset, small_run


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

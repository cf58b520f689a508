"""`attnres generate` on Hugging Face folders: batches, chunks, and what does not fit."""

import json

import pytest
import torch

from attnres.cli import main
from ecosystem.checkpoints import learned, saved, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    saved(folder, learned(max_position_embeddings=64))
    return folder


def run(capsys, *arguments):
    main(["generate", *map(str, arguments)])
    return capsys.readouterr().out.rstrip("\n")


GREEDY = ("--temperature", "0", "--max-new-tokens", "5")


def test_a_folder_continues_a_prompt_as_the_model_does(folder, capsys):
    words, model = tokenizer(), learned(max_position_embeddings=64)
    ids = words("the quick brown", return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert run(capsys, folder, "--prompt", "the quick brown", *GREEDY) == words.decode(expected[0])
    sampled = (folder, "--prompt", "the quick", "--seed", "3", "--max-new-tokens", "20")
    assert run(capsys, *sampled) == run(capsys, *sampled)


def test_several_prompts_are_each_continued_as_alone(folder, capsys):
    alone = [run(capsys, folder, "--prompt", text, *GREEDY) for text in ("the quick brown fox jumps", "the dog")]
    both = ("--prompt", "the quick brown fox jumps", "the dog", "--padding-side", "left")
    assert run(capsys, folder, *both, *GREEDY).split("\n\n") == alone


@pytest.mark.parametrize("size", [1, 3, 100])
def test_chunks_change_nothing(folder, size, capsys):
    prompt = ("--prompt", "the quick brown fox jumps over the lazy dog")
    expected = run(capsys, folder, *prompt, *GREEDY)
    assert run(capsys, folder, *prompt, *GREEDY, "--chunk-size", size) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--prompt", "the quick", "the", *GREEDY),
            "prompts have from 1 to 2 tokens and padding_side is None; allowed is 'left'",
        ),
        (
            ("--prompt", "the quick", "the", "--padding-side", "right", *GREEDY),
            "padding_side is 'right'; allowed is 'left'",
        ),
        (("--prompt", "the " * 70), "a prompt has 70 tokens and max_new_tokens is 100; allowed: together no more than"),
        (("--prompt", "the", "--max-new-tokens", "64"), "the model's context of 64"),
        (("--prompt", "the", "--chunk-size", "0"), "chunk_size is 0; allowed: 1 or more"),
        (("--prompt", " ", *GREEDY), "prompt is ' ', which has no tokens"),
    ],
)
def test_what_does_not_fit_is_refused(folder, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(folder), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_tokenizer_is_refused(tmp_path, capsys):
    learned().save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tmp_path), "--prompt", "the"])
    assert stop.value.code == 2
    assert "has no tokenizer (tokenizer.json or tokenizer_config.json)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 2, "num_return_sequences": 2},
        {"return_dict_in_generate": True},
        {"use_cache": False},
        {"penalty_alpha": 0.5, "top_k": 4},
        {"num_beams": -1},
        {"cache_implementation": "quantized"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_folders_own_settings_of_generation_do_not_interfere(settings, folder, tmp_path, capsys):
    saved(tmp_path, learned(max_position_embeddings=64))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
    prompt = ("--prompt", "the quick", "--chunk-size", "2")
    assert run(capsys, tmp_path, *prompt, *GREEDY) == run(capsys, folder, *prompt, *GREEDY)


def test_weights_that_are_not_finite_are_one_line(tmp_path, capsys):
    model = learned(max_position_embeddings=64)
    torch.nn.init.constant_(model.model.residual.sites[2].pseudo_query, float("nan"))
    saved(tmp_path, model)
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tmp_path), "--prompt", "the", "--max-new-tokens", "3"])
    assert stop.value.code == 2
    assert "AttnResLlamaForCausalLM cannot continue the prompt: probability tensor contains" in capsys.readouterr().err

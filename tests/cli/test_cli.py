import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnres
from attnres.cli import COMMANDS, ON_A_MESH, SECONDS_TO_SPEAK, main
from experiments.runs import dataset
from experiments.test_compare import assert_same_run

SMALL = [
    "--model.hidden-size", "16", "--model.intermediate-size", "24", "--model.num-hidden-layers", "2",
    "--model.num-attention-heads", "2", "--model.num-key-value-heads", "1", "--data.context", "16",
    "--optim.warmup-steps", "1", "--train.batch-size", "2", "--train.eval-sequences", "4", "--train.precision", "fp32",
    "--train.threads", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def options(data):
    return [*SMALL, "--data.dataset", str(data.folder), "--data.vocab-size", str(data.vocab_size)]


@pytest.fixture(scope="module")
def trained(options, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "block"
    main(["train", "--out", str(out), "--residual", "block", "--residual.sublayers-per-block", "2", *options,
          "--train.steps", "4"])  # fmt: skip
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "a.txt").write_text("a file")
    (folder / "list").write_text("[1, 2]")
    return folder


def fails(arguments, capsys):
    """The one line that a wrong call prints."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def tree(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_import_is_light():
    code = "import sys, attnres, attnres.cli; print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_help_names_every_command_and_each_has_its_own(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    overview = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", overview, re.M)
    for command in ("compare", "train", "eval", "generate", "report", "schedule"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"usage: attnres {command}" in capsys.readouterr().out
    main(["--version"])
    assert capsys.readouterr().out == f"attnres {attnres.__version__}\n"


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(ON_A_MESH)))
def test_a_command_without_a_mesh_refuses_several_processes_and_rank_0_says_so(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("0", "2"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stop:
            main([command, "nowhere"])
        assert stop.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == ("" if rank != "0" else (
            f"attnres: error: attnres {command} was started as 3 processes (WORLD_SIZE), and each would do all of it; "
            "allowed: one, without torchrun (train and compare take a mesh)\n"
        ))  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_under_torchrun_others_wait_for_rank_0_to_say_what_is_wrong(monkeypatch, capsys):
    """It ends all processes when the first has ended, which is then to be the one that has spoken."""
    waits = []
    monkeypatch.setattr("attnres.cli.time.sleep", waits.append)
    for name, value in (("WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    for rank, expected in (("0", []), ("1", [SECONDS_TO_SPEAK])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            main(["eval", "nowhere"])
        assert waits == expected
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "3"}])
def test_one_process_is_one_with_and_without_torchrun(environment, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    main(["schedule", "--layers", "2"])
    assert capsys.readouterr().out


@pytest.mark.parametrize("more", [["--residual", "full"], ["--residual=full"]])
def test_the_last_residual_counts_as_the_last_of_other_options_does(more, options, tmp_path, capsys):
    arguments = ["train", "--out", str(tmp_path / "x"), "--residual", "block", *options, *more, "--dry-run"]
    main(arguments)
    assert json.loads(capsys.readouterr().out)["residual"]["type"] == "FullAttnRes"
    error = fails([*arguments, "--residual", "full", "--residual.num-blocks", "4"], capsys)
    assert "num-blocks" in error


def test_every_arm_has_to_fit_the_mesh_before_one_is_trained(options, tmp_path, monkeypatch, capsys):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    error = fails(
        ["compare", "--out", tmp_path / "x", "--arms", "prenorm", "projected", *options, "--parallel.tensor", "2",
         "--model.num-key-value-heads", "2", "--model.num-attention-heads", "2"],
        capsys,
    )  # fmt: skip
    assert "parallel.tensor=2 does not fit: projected" in error
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["op", "phases", "overhead", "memory", "inference", "pipeline"])
def test_every_benchmark_runs_small_and_writes_its_file(name, tmp_path, capsys):
    csv, figure = tmp_path / f"{name}.csv", tmp_path / "depth.svg"
    more = ["--figure", str(figure)] if name == "phases" else []
    main(["bench", name, "--quick", "--csv", str(csv), *more])
    once = capsys.readouterr()
    assert "torch" in once.out
    assert once.err.count("\n") >= 2  # signs of life
    lines = csv.read_text().splitlines()
    assert len(lines) > 5
    assert figure.exists() == bool(more)


def test_a_benchmark_adds_to_a_file_of_its_own_kind_only(tmp_path, capsys):
    csv = tmp_path / "memory.csv"
    for _ in range(2):
        main(["bench", "memory", "--quick", "--dtypes", "float32", "--csv", str(csv)])
    header, *lines = csv.read_text().splitlines()
    assert len(lines) % 2 == 0
    assert header not in lines
    before = csv.read_text()
    capsys.readouterr()
    assert "other columns" in fails(["bench", "op", "--quick", "--csv", csv], capsys)
    assert csv.read_text() == before


def test_each_benchmark_has_help_with_its_real_defaults(capsys):
    main(["bench", "--help"])
    assert "overhead" in capsys.readouterr().out
    for name, default in {
        "op": "9x4096x1024",
        "phases": "128",
        "overhead": "512",
        "memory": "32",
        "inference": "2048",
        "pipeline": "256",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(["bench", name, "--help"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        assert f"usage: attnres bench {name}" in printed
        assert default in printed
        assert "minutes on two cores" in printed


def test_train_eval_generate_and_report_work_on_one_run(trained, capsys):
    main(["eval", str(trained), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] > 0
    main(["eval", str(trained), "--split", "train", "--sequences", "3"])
    assert "train loss" in capsys.readouterr().out
    for _ in range(2):
        main(["generate", str(trained), "--prompt", "it was", "--max-new-tokens", "5"])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("it was")
    main(["generate", str(trained), "--prompt", "it was", "--temperature", "0", "--max-new-tokens", "5"])
    main(["report", str(trained)])
    assert "report:" in capsys.readouterr().out
    assert (trained / "report.html").stat().st_size > 10_000


def test_eval_on_the_training_windows_gives_the_loss_of_the_run(trained, capsys):
    main(["eval", str(trained), "--sequences", "4", "--json"])
    assert (
        json.loads(capsys.readouterr().out)["loss"] == json.loads((trained / "result.json").read_text())["valid_loss"]
    )


def test_compare_prints_a_table_and_writes_a_report(options, tmp_path, capsys):
    main(["compare", "--arms", "prenorm", "block:num_blocks=2", "--out", str(tmp_path / "c"), *options,
          "--train.steps", "2"])  # fmt: skip
    printed = capsys.readouterr().out
    assert "PreNorm (baseline)" in printed
    assert "Block AttnRes (N=2)" in printed
    assert (tmp_path / "c" / "report.html").is_file()
    assert "PreNorm" in (tmp_path / "c" / "table.md").read_text()
    assert [row["arm"] for row in json.loads((tmp_path / "c" / "table.json").read_text())] == [
        "prenorm", "block:num_blocks=2",
    ]  # fmt: skip
    main(["report", str(tmp_path / "c"), "--out", str(tmp_path / "other.html")])
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "c" / "report.html").read_bytes()


def test_dry_run_prints_the_resolved_config_and_costs_and_writes_nothing(options, tmp_path, capsys):
    main(["train", "--out", str(tmp_path / "x"), "--residual", "block", "--residual.num-blocks", "2", "--dry-run",
          *options])  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    assert plan["residual"] == {
        "type": "BlockAttnRes", "read_scale": None, "phases": "auto", "sublayers_per_block": None, "num_blocks": 2,
        "remainder": "tail",
    }  # fmt: skip
    assert plan["plan"]["parameters"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_dry_run_on_a_mesh_needs_no_processes_and_says_what_each_rank_would_hold(command, options, tmp_path, capsys):
    residual = {
        "train": ["--residual", "block", "--residual.sublayers-per-block", "2"],
        "compare": ["--arms", "block:sublayers_per_block=2"],
    }
    mesh = ["--parallel.pipeline", "2", "--parallel.data", "2", "--train.accumulation", "2"]
    main([command, "--out", str(tmp_path / "x"), *residual[command], *options, *mesh, "--dry-run"])
    printed = capsys.readouterr()
    layout = json.loads(printed.out)["layout"]
    assert [share["ranks"] for share in layout] == [[0, 1], [2, 3]]
    assert [share["stages"][0]["receives"] for share in layout] == ["token ids", "E, b2"]
    lines = [line.split() for line in printed.err.splitlines() if line.strip()]
    assert lines[0] == ["ranks", "stage", "sublayers", "layers", "parameters", "receives"]
    assert lines[2][:4] == ["0-1", "0", "0-1", "0"]
    assert lines[3] == ["2-3", "1", "2-3", "1", f"{layout[1]['stages'][0]['parameters']:,}", "E,", "b2"]
    assert "4 processes: parallel.pipeline=2 x parallel.data=2, schedule 1f1b, cache all" in printed.err
    assert list(tmp_path.iterdir()) == []
    error = fails(
        [command, "--out", tmp_path / "x", *residual[command], *options, "--parallel.pipeline", "9", "--dry-run"],
        capsys,
    )
    assert "9 stages, but the model has 4 sublayers" in error


def test_schedule_prints_the_k3_schedule(capsys):
    main(["schedule", "--layers", "93", "--sublayers-per-block", "24"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Block AttnRes (S=24): 93 layers, 186 sublayers, 187 reads of 1003 sources, at most 9 at once"
    assert lines[1] == "blocks: 8 of 24, 24, 24, 24, 24, 24, 24, 18 sublayers"
    assert lines[2].split() == ["site", "0", "layer", "0", "attention", "1", "E"]
    assert len(lines) == 2 + 187
    main(["schedule", "--layers", "1", "--residual", "full", "--json"])
    assert json.loads(capsys.readouterr().out) == [["E"], ["E", "c0"], ["E", "c0", "c1"]]


def test_data_prepare_then_train_on_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("It was the best of times, it was the worst of times. " * 200)
    main(["data", "prepare", str(tmp_path / "d"), "--train", str(tmp_path / "a.txt"), "--tokenizer", "bytes"])
    assert "257 token ids" in capsys.readouterr().out
    main(["train", "--out", str(tmp_path / "r"), *SMALL, "--data.dataset", str(tmp_path / "d"), "--data.vocab-size",
          "257", "--train.steps", "2"])  # fmt: skip
    assert "step 2" in capsys.readouterr().out


def test_killed_and_resumed_on_the_command_line_is_bitwise_the_uninterrupted_run(options, tmp_path):
    arguments = ["train", "--residual", "full", *options, "--train.steps", "40", "--train.checkpoint-every", "7"]
    main([*arguments, "--out", str(tmp_path / "whole")])
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "attnres", *arguments, "--out", str(killed)]
    for steps in (8, 22):
        process = subprocess.Popen(
            [*command, *(["--resume"] if killed.exists() else [])],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        wait_for(killed / "metrics.jsonl", steps, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "result.json").exists()
    main(["train", "--out", str(killed), "--resume"])
    assert_same_run(tmp_path / "whole", killed)


def wait_for(metrics: Path, lines: int, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < until, "the run did not get far enough"
        time.sleep(0.002)


MAMBA = '{"model_type": "mamba", "vocab_size": 257, "hidden_size": 8, "num_hidden_layers": 1}'

BAD = {
    "unknown command": (["trian"], r"command is 'trian'; allowed: compare, train"),
    "no arm": (["compare", "--out", "{out}"], r"Missing from attnres compare: --arms"),
    "unknown arm": (["compare", "--arms", "prenorm", "mhd", "--out", "{out}"], r"arm is 'mhd'; allowed: full, block"),
    "arm twice": (["compare", "--arms", "full", "full", "--out", "{out}"], r"arms are \['full', 'full'\]; allowed"),
    "no seed": (["compare", "--arms", "full", "--seeds", "0", "--out", "{out}"], r"seeds is 0; allowed: 1 or more"),
    "unknown preset": (["train", "--preset", "huge", "--out", "{out}"], r"preset is 'huge'; allowed: tiny, small"),
    "unknown key": (["train", "--train.stps", "3", "--out", "{out}"], r"--train.stps.*perhaps you meant --train.steps"),
    "wrong type": (["train", "--train.steps", "many", "--out", "{out}"], r"--train.steps.*'many'"),
    "wrong choice": (["train", "--train.precision", "fp8", "--out", "{out}"], r"'fp8'.*'auto', 'fp32', 'bf16'"),
    "no steps": (["train", "--train.steps", "0", "--out", "{out}"], r"steps is 0; allowed: 1 or more"),
    "unknown residual": (["train", "--residual", "mhd", "--out", "{out}"], r"residual is 'mhd'; allowed: full, block"),
    "S below 1": (["train", "--residual", "block", "--residual.sublayers-per-block", "0", "--out", "{out}"],
                  r"sublayers_per_block is 0; allowed is a whole number of 1 or more"),
    "both block settings": (["train", "--residual", "block", "--residual.sublayers-per-block", "2",
                             "--residual.num-blocks", "2", "--out", "{out}"], r"give exactly one of the two"),
    "too many blocks": (["train", "--residual", "block", "--residual.num-blocks", "99", "--out", "{out}"],
                        r"num_blocks is 99; allowed is 1 to 4"),
    "vocabulary": (["train", "--data.vocab-size", "300", "--out", "{out}"], r"vocab.*300.*257"),
    "context": (["train", "--data.context", "100000", "--out", "{out}"], r"context.*100000"),
    "vocabulary of a comparison": (["compare", "--arms", "full", "--data.vocab-size", "300", "--out", "{out}"],
                                   r"vocab.*300.*257"),
    "context of a comparison": (["compare", "--arms", "full", "--data.context", "100000", "--out", "{out}"],
                                r"context.*100000"),
    "rate": (["train", "--optim.lr", "inf", "--out", "{out}"], r"lr is inf; allowed: more than 0, and finite"),
    "seed": (["train", "--train.seed", str(10**20), "--out", "{out}"], r"seed is 1000.*; allowed: below 2\*\*63"),
    "odd head": (["train", "--model.hidden-size", "6", "--model.num-attention-heads", "2", "--out", "{out}"],
                 r"hidden_size / num_attention_heads is 3; allowed: an even number"),
    "out in a file": (["train", "--out", "{file}/run"], r"{file}: not a folder, so nothing can be made"),
    "comparison in a file": (["compare", "--arms", "full", "--out", "{file}/c"], r"{file}.*Not a directory"),
    "no config": (["train", "--model.hf-config", "{out}.json", "--out", "{out}"], r"hf_config is .*cannot be read"),
    "config is a list": (["train", "--model.hf-config", "{list}", "--out", "{out}"], r"allowed: a config.json with"),
    "config of an unknown model": (["train", "--model.hf-config", '{"model_type": "nonesuch"}', "--out", "{out}"],
                                   r"Transformers cannot use this model config: .*nonesuch"),
    "config of another family": (["train", "--model.hf-config", MAMBA, "--out", "{out}"], r"do not look like one"),
    "config with other vocabulary": (["train", "--model.hf-config", '{"model_type": "llama"}', "--out", "{out}"],
                                     r"vocab_size 32000; allowed: 257"),
    "prompt of bytes": (["generate", "{run}", "--prompt", "bad\udcff"], r"prompt is .*; allowed: some text in UTF-8"),
    "temperature": (["generate", "{run}", "--prompt", "a", "--temperature", "1e-40"], r"temperature is 1e-40; allowed"),
    "schedule remainder": (["schedule", "--layers", "2", "--residual", "full", "--remainder", "balanced"],
                           r"residual is 'full' and remainder is balanced; allowed: remainder with block only"),
    "no dataset": (["train", "--data.dataset", "{out}/nowhere", "--out", "{out}"], r"nowhere"),
    "no run": (["eval", "{out}"], r"not a run folder"),
    "no run to report": (["report", "{out}"], r"{out}"),
    "no run to resume": (["train", "--resume", "--out", "{out}"], r"not a run folder"),
    "empty prompt": (["generate", "{run}", "--prompt", ""], r"prompt is ''; allowed: some text"),
    "no schedule": (["schedule", "--layers", "0", "--sublayers-per-block", "2"], r"num_sublayers is 0"),
    "schedule settings": (["schedule", "--layers", "2", "--residual", "full", "--sublayers-per-block", "2"],
                          r"residual is 'full' and sublayers-per-block is 2; allowed: .* with block only"),
    "benchmark": (["bench", "nothing"], r"benchmark is 'nothing'; allowed: op, .*, inference, pipeline, tables"),
    "no benchmark": (["bench"], r"benchmark is missing; allowed: op, phases, .*, inference, pipeline, tables"),
    "benchmark shape": (["bench", "op", "--shapes", "9x0x512"], r"tokens is 0; allowed: 1 or more"),
    "benchmark shape word": (["bench", "op", "--shapes", "large"], r"shape is 'large'; allowed: SOURCESxTOKENSxDIM"),
    "benchmark rounds": (["bench", "op", "--rounds", "0"], r"rounds is 0; allowed: 1 or more"),
    "benchmark depth": (["bench", "phases", "--quick", "--sublayers", "2"], r"num_blocks is 4; allowed is 1 to 2"),
    "benchmark model": (["bench", "overhead", "--quick", "--dim", "100"], r"dim is 100; allowed: a multiple of"),
    "benchmark read": (["bench", "memory", "--quick", "--read", "9x8"], r"shape is '9x8'; allowed: SOURCESx"),
    "benchmark option": (["bench", "memory", "--nonesuch", "1"], r"(?i)unrecognized.*--nonesuch"),
    "benchmark file": (["bench", "memory", "--quick", "--csv", "{file}"], r"{file} has other columns"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_exit_status_2_and_nothing_written(name, options, trained, files, tmp_path, capsys):
    arguments, message = BAD[name]
    out = tmp_path / "out"
    places = {"{out}": str(out), "{run}": str(trained), "{file}": str(files / "a.txt"), "{list}": str(files / "list")}
    filled = [re.sub(r"\{(out|run|file|list)\}", lambda m: places[m[0]], argument) for argument in arguments]
    if filled[0] in ("train", "compare") and "--resume" not in filled:
        filled = [filled[0], *without_given(options, filled), *filled[1:]]
    line = fails(filled, capsys)
    for place, path in places.items():
        message = message.replace(place, re.escape(path))
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


def without_given(options, filled):
    """The test's own options but for those that the case sets itself."""
    pairs = zip(options[::2], options[1::2], strict=True)
    return [part for pair in pairs if pair[0] not in filled for part in pair]


def test_a_run_folder_that_exists_is_left_as_it_is(options, trained, capsys):
    before = tree(trained)
    assert "exists; allowed" in fails(["train", "--out", trained, *options], capsys)
    assert "exists; allowed" in fails(["compare", "--arms", "full", "--out", trained, *options], capsys)
    assert "no compare.json" in fails(["compare", "--arms", "full", "--resume", "--out", trained, *options], capsys)
    assert tree(trained) == before


def test_other_settings_on_resume_are_refused_by_name(trained, options, capsys):
    before = tree(trained)
    line = fails(["train", "--out", trained, "--resume", "--residual", "full", *options, "--train.steps", "8"], capsys)
    assert "residual" in line
    assert "BlockAttnRes" in line
    assert tree(trained) == before


def test_resume_starts_from_the_runs_own_settings(options, tmp_path, capsys):
    out = str(tmp_path / "r")
    main(["train", "--out", out, "--residual", "full", *options, "--train.steps", "2", "--train.checkpoint-every", "1"])
    main(["train", "--out", out, "--resume", "--train.steps", "4", "--train.eval-every", "1"])
    printed = capsys.readouterr().out
    assert "step 2" in printed
    assert "step 4" in printed
    line = fails(["train", "--out", out, "--resume", "--train.batch-size", "4"], capsys)
    assert "train.batch_size is 2 there, but 4 was asked for" in line
    line = fails(["train", "--out", out, "--resume", "--preset", "small"], capsys)
    assert "was asked for" in line


def test_a_refused_resume_changes_nothing(options, tmp_path, capsys):
    out = tmp_path / "r"
    main(["train", "--out", str(out), *options, "--train.steps", "2"])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train"}\n')
    before = tree(out)
    capsys.readouterr()
    assert "line 5 is no row of metrics" in fails(["train", "--out", out, "--resume", "--train.steps", "4"], capsys)
    assert tree(out) == before


def test_a_copy_beside_the_checkpoints_is_no_checkpoint(options, trained, tmp_path, capsys):
    import shutil

    run = shutil.copytree(trained, tmp_path / "run")
    (checkpoint,) = (run / "checkpoints").iterdir()
    shutil.copytree(checkpoint, checkpoint.with_name(f"{checkpoint.name}-backup"))
    main(["eval", str(run), "--sequences", "2"])
    assert f"{checkpoint.name}:" in capsys.readouterr().out


def test_a_run_of_a_hugging_face_config_does_not_need_its_file_again(options, tmp_path, capsys):
    from transformers import Qwen3Config

    shape = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(Qwen3Config(**shape).to_json_string())
    command = ["train", "--out", str(tmp_path / "r"), "--residual", "full", *options, "--model.hf-config", str(file)]
    main([*command, "--train.steps", "2"])
    main(["train", "--out", str(tmp_path / "r"), "--resume", "--train.steps", "3"])
    changed = Qwen3Config(**shape, rms_norm_eps=1e-3)
    file.write_text(changed.to_json_string())
    capsys.readouterr()
    assert "model.hf_config is" in fails([*command, "--resume", "--train.steps", "4"], capsys)
    file.unlink()
    main(["eval", str(tmp_path / "r"), "--sequences", "2"])


def test_a_corrupted_shard_and_a_damaged_checkpoint_are_refused_by_name(options, trained, tmp_path, capsys):
    import shutil

    folder = Path(options[options.index("--data.dataset") + 1])
    data = shutil.copytree(folder, tmp_path / "data")
    shard = data / "train.bin"
    content = bytearray(shard.read_bytes())
    content[1001] ^= 1
    shard.write_bytes(content)
    changed = [str(data) if option == str(folder) else option for option in options]
    assert "train.bin" in fails(["train", "--out", tmp_path / "r", *changed], capsys)
    assert not (tmp_path / "r").exists()
    run = shutil.copytree(trained, tmp_path / "run")
    (checkpoint,) = (run / "checkpoints").iterdir()
    weights = bytearray((checkpoint / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (checkpoint / "model.safetensors").write_bytes(weights)
    assert checkpoint.name in fails(["train", "--out", run, "--resume", "--train.steps", "8"], capsys)
    assert checkpoint.name in fails(["eval", run], capsys)

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from attnres.analysis import comparison_table, load_comparison, write_report
from attnres.errors import CheckpointError, ConfigError
from attnres.experiments.arms import arm_folder, arm_label, arm_optim, parse_arm
from attnres.experiments.compare import Comparison, compare
from attnres.experiments.describe import describe
from attnres.experiments.models import build_model
from attnres.experiments.presets import PRESETS, preset, small
from attnres.experiments.run import run
from attnres.optim import OptimConfig, build_optimizer
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm
from attnres.residual.variants.cut_block import CutBlock
from attnres.train import load_run_config, read_metrics
from experiments.runs import dataset, small_run

TIMING = {"tokens_per_second", "seconds"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("data"))


def newest_weights(folder):
    return load_file(sorted((folder / "checkpoints").iterdir())[-1] / "model.safetensors")


def numbers(folder):
    return [{key: value for key, value in row.items() if key not in TIMING} for row in read_metrics(folder)]


def assert_same_run(one, other):
    assert numbers(one) == numbers(other)
    mine, theirs = newest_weights(one), newest_weights(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert (one / "depth.json").read_text() == (other / "depth.json").read_text()


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "first"
    comparison = Comparison(arms=("block", "prenorm", "full"), seeds=(0, 1), base=small_run(data))
    compare(comparison, out, progress=False, isolate=False)
    return comparison, out


def test_a_comparison_has_one_run_per_arm_and_seed_and_prenorm_is_the_baseline(compared):
    comparison, out = compared
    assert comparison.baseline == "prenorm"
    listed = json.loads((out / "compare.json").read_text())
    assert listed["runs"]["block"] == ["block-seed0", "block-seed1"]
    for arm, strategy in {"prenorm": PreNorm, "block": BlockAttnRes, "full": FullAttnRes}.items():
        for seed in (0, 1):
            config = load_run_config(out / f"{arm}-seed{seed}")
            assert type(config.residual) is strategy
            assert config.train.seed == seed
    rows = comparison_table(load_comparison(out))
    assert [row.arm for row in rows] == ["block", "prenorm", "full"]
    report = write_report(out).read_text()
    assert "Block AttnRes (S=4)" in report


def test_arms_of_a_seed_start_from_the_same_function_and_read_the_same_batches(compared):
    _, out = compared
    for seed in (0, 1):
        first = {arm: read_metrics(out / f"{arm}-seed{seed}")[0]["loss"] for arm in ("prenorm", "block", "full")}
        assert first["block"] == pytest.approx(first["prenorm"], abs=2e-4)
        assert first["full"] == pytest.approx(first["prenorm"], abs=2e-4)
    states = [
        json.loads((sorted((out / f"{arm}-seed0" / "checkpoints").iterdir())[-1] / "state.json").read_text())
        for arm in ("prenorm", "block", "full")
    ]
    assert states[0]["sampler"] == states[1]["sampler"] == states[2]["sampler"]
    seeds = [read_metrics(out / f"prenorm-seed{seed}")[1]["loss"] for seed in (0, 1)]
    assert seeds[0] != seeds[1]


def test_two_runs_of_one_config_are_bitwise_equal(compared, tmp_path):
    _, out = compared
    run(load_run_config(out / "block-seed0"), tmp_path / "again", progress=False)
    assert_same_run(out / "block-seed0", tmp_path / "again")


def test_going_on_keeps_finished_runs_and_adds_arms_and_seeds(data, tmp_path):
    out, base = tmp_path / "c", small_run(data, steps=2, checkpoint_every=1)
    compare(Comparison(arms=("prenorm",), seeds=(0,), base=base), out, progress=False, isolate=False)
    before = (out / "prenorm-seed0" / "metrics.jsonl").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="exists; allowed: a new path, or --resume"):
        compare(Comparison(arms=("full",), seeds=(0,), base=base), out, progress=False, isolate=False)
    grown = Comparison(arms=("prenorm", "full"), seeds=(0, 1), base=base)
    compare(grown, out, resume=True, progress=False, isolate=False)
    assert (out / "prenorm-seed0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == [
        "full-seed0", "full-seed1", "prenorm-seed0", "prenorm-seed1",
    ]  # fmt: skip
    compare(Comparison(arms=("block",), seeds=(0,), base=base), out, resume=True, progress=False, isolate=False)
    listed = json.loads((out / "compare.json").read_text())
    assert (listed["arms"], listed["seeds"], listed["baseline"]) == (["prenorm", "full", "block"], [0, 1], "prenorm")


def test_going_on_with_other_settings_is_refused_before_anything_is_trained(data, tmp_path):
    out, base = tmp_path / "c", small_run(data, steps=2)
    compare(Comparison(arms=("prenorm",), seeds=(0,), base=base), out, progress=False, isolate=False)
    before = sorted(out.rglob("*")), (out / "compare.json").read_text()
    wider = replace(base, model=replace(base.model, hidden_size=32))
    for arms in (("full", "prenorm"), ("full",)):
        other = Comparison(arms=arms, seeds=(0,), base=wider)
        with pytest.raises(ConfigError, match=r"model\.hidden_size is 16 there, but 32 was asked for"):
            compare(other, out, resume=True, progress=False, isolate=False)
    assert (sorted(out.rglob("*")), (out / "compare.json").read_text()) == before


def test_the_first_error_stops_the_runs_that_have_not_begun(data, tmp_path):
    base = small_run(data)
    broken = replace(base, train=replace(base.train, init_from=str(tmp_path / "nowhere")))
    comparison = Comparison(arms=("full", "prenorm"), seeds=(0, 1), base=broken)
    with pytest.raises(CheckpointError, match="nowhere"):
        compare(comparison, tmp_path / "c", progress=False)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["compare.json"]


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_comparison_is_refused_by_name(content, data, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "compare.json").write_text(content)
    with pytest.raises(ConfigError, match=r"compare\.json is damaged"):
        compare(Comparison(arms=("full",), seeds=(0,), base=small_run(data)), tmp_path / "c", resume=True)


def test_prenorm_becomes_the_baseline_when_it_is_added(data, tmp_path):
    out, base = tmp_path / "c", small_run(data, steps=2)
    compare(Comparison(arms=("full",), seeds=(0,), base=base), out, progress=False, isolate=False)
    assert json.loads((out / "compare.json").read_text())["baseline"] == "full"
    added = Comparison(arms=("prenorm",), seeds=(0,), base=base)
    compare(added, out, resume=True, progress=False, isolate=False)
    assert json.loads((out / "compare.json").read_text())["baseline"] == "prenorm"


def test_a_checkpoint_of_a_comparison_of_one_arm_trains_on(data, tmp_path):
    """With more steps as itself, and as the start of a Block AttnRes run: the base parameters have the same names."""
    out = tmp_path / "one"
    base = small_run(data, steps=4)
    compare(Comparison(arms=("prenorm",), seeds=(0,), base=base), out, progress=False, isolate=False)
    folder = out / "prenorm-seed0"
    longer = load_run_config(folder)
    longer = replace(longer, train=replace(longer.train, steps=8))
    assert run(longer, folder, resume=True, progress=False)["steps"] == 8
    continued = replace(
        longer,
        residual=BlockAttnRes(sublayers_per_block=2, read_scale="sum"),
        train=replace(longer.train, init_from=str(folder)),
    )
    run(continued, tmp_path / "block", progress=False)
    last, first = read_metrics(folder)[-1]["loss"], read_metrics(tmp_path / "block")[0]["loss"]
    assert first == pytest.approx(last, rel=1e-5)  # zero queries: the same function


def test_a_run_in_a_process_of_its_own_is_the_same_run(compared, tmp_path):
    comparison, out = compared
    one = Comparison(arms=("full",), seeds=(1,), base=comparison.base)
    compare(one, tmp_path / "c", progress=False, isolate=True)
    assert_same_run(out / "full-seed1", tmp_path / "c" / "full-seed1")


@pytest.mark.parametrize(
    ("word", "strategy"),
    [
        ("prenorm", PreNorm()),
        ("full", FullAttnRes()),
        ("full:read_scale=sum", FullAttnRes(read_scale="sum")),
        ("block", BlockAttnRes(sublayers_per_block=4)),
        ("block:sublayers-per-block=3", BlockAttnRes(sublayers_per_block=3)),
        ("block:num_blocks=4,remainder=balanced", BlockAttnRes(num_blocks=4, remainder="balanced")),
        ("cut-block:boundaries=2+5+9", CutBlock(boundaries=(2, 5, 9))),
        ("cut-block:boundaries=12,phases=one", CutBlock(boundaries=(12,), phases="one")),
    ],
    ids=str,
)
def test_arms_are_words(word, strategy):
    assert parse_arm(word) == strategy


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mhd", "arm is 'mhd'; allowed: full, block, input-dependent"),
        ("block:size=4", "unknown key 'residual.size'; allowed: read_scale, phases, sublayers_per_block"),
        ("block:4", "allowed after the colon: key=value"),
        ("block:sublayers_per_block=0", "sublayers_per_block is 0"),
        ("block:num_blocks=2,sublayers_per_block=2", "give exactly one"),
        ("full:read_scale=max", "read_scale"),
        ("block:num_blocks=2,num_blocks=3", "allowed is each setting once"),
        ("prenorm:x=1", "arm 'prenorm:x=1': unknown key 'residual.x'; allowed: none"),
        ("cut-block:boundaries=5+2", "boundaries is .5, 2.; allowed are whole numbers of 1 or more that rise"),
    ],
    ids=str,
)
def test_a_wrong_arm_is_told_in_one_line(word, message):
    with pytest.raises(ConfigError, match=message):
        parse_arm(word)


def test_an_arm_may_have_optimizer_settings_of_its_own():
    base = OptimConfig(lr=2e-3)
    word = "block:num_blocks=2@train_only=depth,lr=1e-3"
    assert parse_arm(word) == BlockAttnRes(num_blocks=2)
    assert arm_optim(word, base) == replace(base, train_only="depth", lr=1e-3)
    assert arm_optim("block:num_blocks=2", base) == base
    assert arm_label(word) == "Block AttnRes (N=2), train_only=depth, lr=1e-3"
    assert arm_folder(word, 0) == "block-num-blocks-2-train-only-depth-lr-1e-3-seed0"
    for wrong, message in (
        ("full@rate=1", "arm 'full@rate=1': unknown key 'rate'"),
        ("full@lr=1,lr=2", "each setting once"),
        ("full@train_only=some", "train_only is 'some'"),
        ("full@lr", "key=value"),
    ):
        with pytest.raises(ConfigError, match=message):
            arm_optim(wrong, base)


def test_arms_that_differ_in_what_is_trained_are_compared_and_gone_on_with(data, tmp_path):
    both = Comparison(arms=("full", "full@train_only=depth"), seeds=(0,), base=small_run(data, steps=2))
    compare(both, tmp_path / "c", progress=False, isolate=False)
    listed = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert listed["labels"] == {"full": "Full AttnRes", "full@train_only=depth": "Full AttnRes, train_only=depth"}
    saved = [load_run_config(tmp_path / "c" / listed["runs"][arm][0]).optim.train_only for arm in both.arms]
    assert saved == ["all", "depth"]
    assert (tmp_path / "c" / "full-train-only-depth-seed0" / "depth.json").is_file()
    more = Comparison(arms=("prenorm",), seeds=(0,), base=small_run(data, steps=2))
    compare(more, tmp_path / "c", resume=True, progress=False, isolate=False)
    assert json.loads((tmp_path / "c" / "compare.json").read_text())["arms"] == [*both.arms, "prenorm"]


def test_an_arm_without_anything_to_train_is_refused_before_anything_runs(data, tmp_path):
    nothing = Comparison(arms=("full", "prenorm@train_only=depth"), seeds=(0,), base=small_run(data))
    with pytest.raises(ConfigError, match="has no parameters of its own"):
        compare(nothing, tmp_path / "c", progress=False)
    assert not (tmp_path / "c").exists()


def test_folders_of_different_arms_differ(data):
    assert arm_folder("block:num_blocks=4", 1) == "block-num-blocks-4-seed1"
    assert arm_folder("wav:bias=-4", 0) != arm_folder("wav:bias=4", 0)
    base = small_run(data)
    for arms in ((), ("full", "full"), ("block:num_blocks=1", "block:num-blocks=1")):
        with pytest.raises(ConfigError, match="arms are"):
            Comparison(arms=arms, seeds=(0,), base=base)


def test_an_arm_that_does_not_fit_the_depth_is_refused_before_anything_runs(data):
    with pytest.raises(ConfigError, match="num_blocks is 9; allowed is 1 to 4"):
        Comparison(arms=("prenorm", "block:num_blocks=9"), seeds=(0,), base=small_run(data))


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("family", ["llama", "qwen3", "kimi_linear"])
def test_presets_build_in_every_family_and_their_costs_are_counted(name, family):
    config = preset(name)
    config = replace(config, model=replace(config.model, family=family, num_hidden_layers=4), residual=FullAttnRes())
    plan = describe(config)
    model = build_model(config)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.extra_parameters == 2 * 9 * config.model.hidden_size
    assert plan.training_tokens == config.train.steps * config.train.batch_size * config.data.context
    assert plan.flops_per_token > 0
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    slots = sum(tensor.numel() for tensor in optimizer.state_dict().values() if tensor.dim() > 0)
    assert plan.state_bytes == 4 * (2 * plan.parameters + slots)
    frozen = describe(replace(config, optim=replace(config.optim, train_only="depth")))
    assert frozen.state_bytes == 4 * (plan.parameters + 3 * plan.extra_parameters)


def test_the_small_preset_is_as_large_as_a_study_needs():
    plan = describe(small())
    assert plan.parameters >= 3_000_000
    assert plan.training_tokens >= 4_000_000

import json

import pytest

from attnres.cli import main
from attnres.residual import STRATEGIES


def test_lists_every_strategy_with_rule_source_and_costs(capsys):
    main(["strategies", "--layers", "4", "--hidden-size", "32", "--json"])
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert list(entries) == list(STRATEGIES)
    for entry in entries.values():
        assert entry["formula"]
        assert entry["citation"]
        assert entry["state"] >= 1
        assert entry["moved"] > 0
    assert entries["prenorm"]["moved"] == 3
    assert entries["prenorm"]["parameters"] == 0
    assert entries["full"]["state"] == 9
    assert entries["full"]["parameters"] == 9 * 2 * 32


def test_the_table_names_every_strategy(capsys):
    main(["strategies", "--layers", "4", "--hidden-size", "32"])
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in STRATEGIES)


def test_a_depth_that_does_not_fit_is_one_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["strategies", "--layers", "0"])
    assert stop.value.code == 2
    assert "num_sublayers is 0" in capsys.readouterr().err


def test_a_strategy_that_does_not_fit_is_named_and_the_others_are_listed(capsys):
    main(["strategies", "--layers", "1", "--hidden-size", "7", "--json"])
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["hybrid"]["problem"] == "first_sublayer is 4; allowed is below 2 (the number of sublayers)"
    assert entries["hybrid"]["parameters"] is None
    assert entries["prenorm"]["problem"] is None
    main(["strategies", "--layers", "1", "--hidden-size", "7"])
    assert "does not fit: first_sublayer is 4" in capsys.readouterr().out


def test_schedule_takes_every_strategy_as_an_arm(capsys):
    for name in STRATEGIES:
        main(["schedule", "--layers", "4", "--residual", name, "--json"])
        schedule = json.loads(capsys.readouterr().out)
        assert len(schedule) == 9
        assert all(source for sources in schedule for source in sources)
    main(["schedule", "--layers", "2", "--residual", "hybrid:first_sublayer=0", "--json"])
    assert json.loads(capsys.readouterr().out)[-1] == ["E", "c0", "c1", "c2", "c3"]


def test_train_says_where_settings_go(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--residual", "window:window=4", "--out", "x"])
    assert stop.value.code == 2
    assert "settings are --residual.* options" in capsys.readouterr().err

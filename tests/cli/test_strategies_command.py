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

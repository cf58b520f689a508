"""Result files grow row by row and are never mixed with rows of other columns."""

from dataclasses import dataclass

import pytest
import torch

from attnres.bench import machine as machine_module
from attnres.bench.machine import Machine, device_of, measured_on
from attnres.bench.results import collect, columns, prepare, read, significant
from attnres.bench.summary import summary
from attnres.errors import ConfigError

MACHINE = Machine(
    date="2026-01-02T03:04+00:00", commit="abc", attnres="0.1.0", torch="2.13.0", device="cpu", processor="A, 2 GHz",
    threads=2, allocator="kept", load_average=0.1, busy_cores=0.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    value: float | None


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "new folder" / "results.csv"
    for value in (1.5, None):
        prepare(path, Row)
        collect([Row(name='a "b", c', value=value)], MACHINE, path)
    header, *lines = path.read_text().splitlines()
    assert header.split(",") == columns(Row)
    assert header.startswith("date,commit,attnres,torch,device,processor,threads")
    assert len(lines) == 2
    rows = read(path)
    assert [row["value"] for row in rows] == ["1.5", ""]
    assert rows[0]["name"] == 'a "b", c'
    assert rows[0]["processor"] == "A, 2 GHz"


def test_each_row_is_in_the_file_before_the_next_is_measured(tmp_path):
    path = tmp_path / "results.csv"
    prepare(path, Row)

    def rows():
        for count in range(3):
            assert len(read(path)) == count
            yield Row(name=str(count), value=0.0)

    assert [row.name for row in collect(rows(), MACHINE, path)] == ["0", "1", "2"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(collect([Row(name="a", value=1.0)], MACHINE, None)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(",value", ""), "missing: value"),
        (lambda text: text.replace(",value", ",value,more"), "unknown: more"),
        (lambda text: text.replace("name,value", "value,name"), "another order"),
        (lambda text: text + "2026,a,b", "ends in the middle of a line"),
    ],
    ids=["fewer", "more", "another order", "torn"],
)
def test_a_file_that_the_rows_do_not_fit_is_refused_and_left_alone(tmp_path, change, message):
    path = tmp_path / "results.csv"
    prepare(path, Row)
    text = change(path.read_text())
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        prepare(path, Row)
    assert path.read_text() == text


def test_numbers_have_no_digits_that_mean_nothing():
    assert significant(123.456789) == 123.46
    assert significant(0.000123456789, 3) == 0.000123


def test_the_machine_is_described():
    machine = measured_on(torch.device("cpu"))
    assert (machine.device, machine.torch, machine.threads) == ("cpu", torch.__version__, torch.get_num_threads())
    assert machine.processor


@pytest.mark.parametrize(("busy", "warns"), [(0.0, False), (1.7, True), (None, True)])
def test_a_busy_machine_is_told(monkeypatch, capsys, busy, warns):
    monkeypatch.setattr(machine_module, "_busy_cores", lambda: busy)
    monkeypatch.setattr("os.getloadavg", lambda: (1.8, 1.0, 1.0))
    measured_on(torch.device("cpu"))
    warning = capsys.readouterr().err
    assert warning.startswith("warning: load average 1.8") == warns
    assert warning.endswith("numbers taken on a busy machine are distorted\n") == warns


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        device_of("cuda")


OP = "date,processor,form,direction,sources,tokens,dim,dtype,median_ms,floor_ms,floor_multiple,note\n"


def test_the_summary_takes_the_newest_run_of_each_shape(tmp_path):
    path = tmp_path / "op.csv"
    path.write_text(
        OP + "day 1,GPU,attnres (triton),forward,9,8,4,bfloat16,99,1,99,\n"
        "day 1,GPU,attnres (triton),forward+backward,9,8,4,bfloat16,999,1,999,\n"
        "day 2,CPU,attnres (cpu),forward,9,8,4,bfloat16,77,1,77,\n"
        "day 2,GPU,slow,gate,9,8,4,bfloat16,,,,wrong by 0.1 in the value (allowed 0.01)\n"
        "day 2,GPU,attnres (triton),forward,9,8,4,bfloat16,2,1,2,\n"
        "day 2,GPU,peer,forward,9,8,4,bfloat16,3,1,3,\n"
        "day 2,GPU,attnres (triton),forward+backward,9,8,4,bfloat16,7.8,2.9,2.69,\n"
        "day 2,GPU,peer,forward+backward,9,8,4,bfloat16,15.6,2.9,5.38,\n"
        "day 2,GPU,attnres (triton),one token,9,1,1024,bfloat16,0.01,,,\n"
        "day 3,GPU,attnres (triton),gate,2,1,4,bfloat16,,,,wrong by nan in the value (allowed 0.01)\n"
    )
    header, first, second = summary(path).splitlines()
    assert header.split() == ["sources", "x", "tokens", "x", "dim", "forward", "backward", "slow", "peer"]
    # backward: 5.8 ms for 19 of 29 rows, whose floor is 1.9 ms
    assert first.split("  ")[0] == "9x8x4 bfloat16"
    assert first.split()[2:] == ["50%", "33%", "wrong", "by", "0.1", "1.50x", "2.00x"]
    assert "wrong by nan" in second


def test_an_empty_file_has_no_summary(tmp_path):
    path = tmp_path / "op.csv"
    path.write_text(OP)
    with pytest.raises(ConfigError, match="no rows"):
        summary(path)

"""The suite itself: limits, errors, verdicts as JSON, and where adapters are found."""

import io
import math
import sys
import textwrap

import pytest
import torch
from rich.console import Console

from attnres.errors import ConfigError, DataError
from attnres.testing import CHECKS, DEFINITIONS, Adapter, NotApplicable, run, select, tables
from attnres.testing.adapters import OURS, SHIPPED
from attnres.testing.checks.schedule import describe
from attnres.testing.definition import members
from attnres.testing.load import load_adapter
from attnres.testing.outcome import Finding, error, number, settle
from attnres.testing.report import BEGIN, END, Report, from_json, markdown, to_json, update_page
from testing.broken_models import adapter as model_adapter
from testing.plain import Plain, PlainModel


class ReadOnly(Adapter):
    name = "read only"
    read = Plain.read
    prepare, score, norm, weights, values, finish = (
        getattr(Plain, n) for n in ("prepare", "score", "norm", "weights", "values", "finish")
    )


def status(adapter, *names):
    return {outcome.check: outcome.status for outcome in run(adapter, select(names)).outcomes}


def outcome(adapter, name):
    return run(adapter, [CHECKS[name]]).outcomes[0]


def test_what_an_adapter_leaves_out_is_not_applicable_and_never_passed():
    verdicts = run(ReadOnly())
    areas = {one.check.partition(".")[0]: one.status for one in verdicts.outcomes if one.status != "pass"}
    assert set(areas) == {
        "value", "gradient", "phases", "schedule", "output", "init", "sites", "zero_query", "backward", "golden",
        "locality",
    }  # fmt: skip
    assert set(areas.values()) == {"n/a"}
    assert outcome(ReadOnly(), "schedule.counts").where == "no model"


def test_a_declared_limit_is_not_applicable_and_an_undeclared_one_fails():
    class Declared(ReadOnly):
        max_sources, power_of_two_width, dtypes = 40, True, (torch.float32,)

    class Limited(ReadOnly):
        def read(self, sources, query, key_weight, *, eps):
            if len(sources) > 40:
                raise ValueError("at most 40 sources")
            return super().read(sources, query, key_weight, eps=eps)

    assert outcome(Declared(), "value.float64").where == "declared: takes float32"
    assert outcome(Declared(), "extremes.many_sources").status == "pass"  # of 33
    assert outcome(Declared(), "extremes.odd_widths").status == "pass"  # of 1
    found = outcome(Limited(), "extremes.many_sources")
    assert (found.status, found.seen) == ("fail", "ValueError: at most 40 sources")

    class Narrow(Declared):
        max_sources = 8

    assert outcome(Narrow(), "extremes.many_sources").where == "declared: at most 8 sources"


def test_a_forward_only_implementation_is_not_asked_for_gradients():
    class Forward(ReadOnly):
        has_gradient = False

        def read(self, sources, query, key_weight, *, eps):
            with torch.no_grad():
                return super().read(sources, query, key_weight, eps=eps)

    assert not run(Forward()).failures
    assert set(status(Forward(), "gradient").values()) == {"n/a"}


def test_fixed_eps_and_parameters_in_the_dtype_of_sources_can_be_declared():
    class Declared(ReadOnly):
        fixed_eps, parameters_as_sources = 1e-3, True

        def read(self, sources, query, key_weight, *, eps):
            assert eps == 1e-3
            assert {query.dtype, key_weight.dtype} == {source.dtype for source in sources[-1:]}
            return super().read(sources, query, key_weight, eps=1e-3)

    verdicts = run(Declared())
    assert not verdicts.failures
    assert outcome(Declared(), "dtype.one_rounding").status == "n/a"
    assert outcome(Declared(), "golden.reads").where == "declared: eps is 0.001"


def test_a_model_that_skips_a_sublayer_fails():
    class Lazy(Plain):
        def model(self, *arguments, **keywords):
            made = super().model(*arguments, **keywords)
            run_all = made.run
            made.run = lambda embedding, sublayers: run_all(embedding, sublayers[:-1])
            return made

    assert outcome(Lazy(), "schedule.counts").seen == "RuntimeError: 5 of 6 sublayers are called"


def test_a_finding_that_is_no_number_does_not_hold():
    assert not number("case", math.nan, 1.0, 1e-3).holds
    assert not error("case", torch.tensor([math.nan]), torch.ones(1).double(), 1.0).holds
    assert not error("case", None, torch.ones(1), 1.0).holds
    assert not error("case", torch.ones(2), torch.ones(1), 1.0).holds


def test_an_outcome_shows_the_comparison_nearest_to_its_limit():
    findings = [Finding(where=str(at), seen=at, expected=10.0, holds=True) for at in (3.0, 9.0, 5.0)]
    found = settle("check", findings)
    assert (found.status, found.where, found.comparisons) == ("pass", "9.0", 3)


def test_an_answer_that_it_does_not_exist_ends_a_check():
    def findings():
        raise NotApplicable("no such thing")
        yield

    assert settle("check", findings()).where == "no such thing"


def test_shares_are_told_in_words():
    assert describe(torch.tensor([0.25, 0.5, 0.5, 0.1, 0.0])) == "0.25 E, 0.5 c0+c1, 0.1 c2"
    assert describe(torch.zeros(3)) == "nothing"
    assert describe(torch.tensor([0.5, *[0.5] * 9])) == "0.5 E, 0.5 c0+..+c8"


def test_members_of_the_definition_are_those_of_the_paper():
    assert members(0, 2) == [[-1]]
    assert members(4, 2) == [[-1], [0, 1], [2, 3]]
    assert members(5, 2) == [[-1], [0, 1], [2, 3], [4]]
    assert len(members(186, 24)) == 9  # Kimi K3's output read


def test_checks_are_selected_by_name_or_area():
    assert [check.name for check in select(["init", "value.eps"])] == ["value.eps", "init.queries", "init.key_weights"]
    with pytest.raises(ConfigError, match="check is 'speed'; allowed: the areas backward"):
        select(["speed"])


def test_every_check_says_what_has_to_be_true():
    assert all(check.claim and check.level in ("definition", "contract") for check in CHECKS.values())
    assert set(DEFINITIONS) == {"kimi", "inkling-2"}
    assert set(OURS) < set(SHIPPED)


def test_verdicts_survive_json_and_become_tables(tmp_path):
    class Bad(ReadOnly):
        name, version = "bad", "2"

        def finish(self, mixed, sources):
            return mixed.to(sources[0].dtype) * math.inf

    report = Report([run(Bad(), select(["value", "dtype.result"]))], {"other": "needs a GPU"}, "2026-11-30", "2", "1")
    again = from_json(to_json(report))
    assert to_json(again) == to_json(report)
    assert again.failed
    assert again.verdicts[0].count("fail") == len(again.verdicts[0].failures) > 3
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    update_page(page, again)
    assert markdown(again) in page.read_text()
    assert "old" not in page.read_text()
    assert "Not run: other (needs a GPU)." in page.read_text()


def test_a_page_without_marks_and_json_of_something_else_are_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(DataError, match="has no place for verdicts"):
        update_page(page, Report([]))
    with pytest.raises(DataError, match="no conformance verdicts"):
        from_json("{}")


TWO = """
    from attnres.testing import Adapter

    class Left(Adapter):
        name = "left"
        def read(self, sources, query, key_weight, *, eps):
            return sources[0]

    class Right(Left):
        name = "right"

    class Unfinished(Adapter):
        name = "unfinished"
"""


def test_adapters_are_found_in_files_and_modules(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(textwrap.dedent(TWO))
    assert load_adapter(f"{file}:Right").name == "right"
    assert load_adapter("testing.plain:Plain").name == "plain"
    for place, message in {
        str(file): "defines 2 adapters",
        f"{file}:Middle": "no adapter 'Middle'; it has: Left, Right",
        f"{file}:Unfinished": "adapter Unfinished is not complete",
        str(tmp_path / "none.py"): "there is no such file",
        "no.such.module:Class": "cannot be imported",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_adapter(place)
    file.write_text(textwrap.dedent(TWO).replace("class Right(Left):", "class _Right(Left):"))
    assert load_adapter(str(file)).name == "left"  # an abstract class is no adapter


BESIDE = """
    import conformance_beside
    from attnres.testing import Adapter

    class Mine(Adapter):
        name = conformance_beside.NAME
        def read(self, sources, query, key_weight, *, eps):
            return sources[0]
"""


def test_what_lies_beside_an_adapter_can_be_imported(tmp_path, monkeypatch):
    (tmp_path / "conformance_beside.py").write_text("NAME = 'beside'")
    (tmp_path / "conformance_mine.py").write_text(textwrap.dedent(BESIDE))
    before = list(sys.path)
    assert load_adapter(str(tmp_path / "conformance_mine.py")).name == "beside"
    monkeypatch.chdir(tmp_path)
    assert load_adapter("conformance_mine:Mine").name == "beside"
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package", "cannot be imported: No module named 'no_such_package'"),
        ("def x(:", "cannot be imported: invalid syntax"),
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit: 0"),
        ("nothing", "cannot be imported: NameError: name 'nothing' is not defined"),
        (
            "CLASS    def __init__(self): raise ValueError('two\\nlines')",
            "adapter A cannot be made: ValueError: two lines",
        ),
        ("CLASS    def __init__(self, path): pass", "adapter A cannot be made: TypeError: A.__init__"),
        ("CLASS    version = 1", "version of adapter A is 1, which is no str"),
        ("CLASS    dtypes = ()", "dtypes of adapter A is"),
    ],
)
def test_whatever_an_adapter_raises_is_told_in_one_line(text, message, tmp_path):
    head = "from attnres.testing import Adapter\nclass A(Adapter):\n    name = 'a'\n    def read(self, *_, eps): pass\n"
    (tmp_path / "broken.py").write_text(text.replace("CLASS", head))
    with pytest.raises(ConfigError, match=message) as raised:
        load_adapter(str(tmp_path / "broken.py"))
    assert "\n" not in str(raised.value)


def test_a_read_that_exits_fails():
    class Exits(ReadOnly):
        def read(self, sources, query, key_weight, *, eps):
            sys.exit(0)

    found = outcome(Exits(), "value.softmax")
    assert (found.status, found.seen) == ("fail", "SystemExit: 0")


class Packed(PlainModel):
    """Queries are views of one parameter, made once."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.packed = torch.stack([one.detach() for one in self.queries]).requires_grad_()
        self.queries = list(self.packed.unbind(0))


class Anew(Packed):
    """Or each time that they are asked for."""

    queries = property(lambda self: [self.packed[at] for at in range(len(self.packed))], lambda self, value: None)

    def __init__(self, adapter, num_sublayers, size, dim, eps, dtype):
        self.packed = torch.zeros(num_sublayers + 1, dim, dtype=dtype, requires_grad=True)
        PlainModel.__init__(self, adapter, num_sublayers, size, dim, eps, dtype)


class Copies(Anew):
    queries = property(lambda self: [one * 1 for one in self.packed], lambda self, value: None)


@pytest.mark.parametrize("stack", [Packed, Anew])
def test_packed_parameters_are_written_to_and_differentiated_through_their_views(stack):
    names = ["schedule", "output", "init", "sites", "backward", "golden.schedule"]
    assert set(status(model_adapter(stack), *names).values()) == {"pass"}


def test_what_is_no_parameter_is_refused_in_words():
    found = outcome(model_adapter(Copies), "schedule.members")
    assert (found.status, found.where) == ("fail", "an error is raised")
    assert "neither leaf tensors (parameters) nor views of leaf tensors" in found.seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_right_implementation_of_16_bits_only_passes(dtype):
    class Short(Plain):
        dtypes = (dtype,)

    assert not run(Short()).failures
    assert outcome(Short(), "golden.reads").where == "declared: 16 bits, which do not hold the golden inputs"


def test_names_are_no_markup_and_no_cells():
    class Odd(ReadOnly):
        name = "[red]x[/red]|<b>"

    report = Report([run(Odd(), select(["value.softmax"]))])
    assert "| [red]x[/red]\\|&lt;b> |" in markdown(report)
    console = Console(width=200, file=io.StringIO())
    for table in (tables.outcomes(report.verdicts[0]), tables.matrix(report)):
        console.print(table)
    assert console.file.getvalue().count("[red]x[/red]|<b>") == 2
    assert report.verdicts[0].title == "[red]x[/red]|<b>"


def test_promises_beyond_the_paper_are_marked_and_can_be_left_out():
    chosen = select(["definition"])
    assert {check.level for check in chosen} == {"definition"}
    assert {check.name for check in select(["contract"])}.isdisjoint(check.name for check in chosen)
    assert tables.marked("dtype.result") == "dtype.result*"
    assert tables.marked("value.eps") == "value.eps"

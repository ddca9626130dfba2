"""The documentation against the code: links, commands, examples, tables of fields."""

import inspect
import re
import shlex
from contextlib import suppress
from itertools import pairwise

import pytest
from pdreal.cli import app as pdreal_app
from pdreal.settings.host import Hosts
from pyarrow import parquet

import pdsim
from docs.commands import reference
from pdsim import load_scenario
from pdsim.calibration.validate.suite import SuiteFile, suite_of
from pdsim.cli import app as pdsim_app
from pdsim.cli import main
from pdsim.metrics import plots
from pdsim.metrics.explanation.stages import STAGES
from pdsim.metrics.run_folder import read_summary
from pdsim.metrics.tables import TABLES
from pdsim.scenario.loading import parse_scenario
from pdsim.scenario.yaml_file import parse_yaml
from pdsim.show.reference import entry
from pdsim.study.sweeping.sweep_file import SweepFile
from tests.markdown import ROOT, anchors, blocks, commands, pages, plain, prose, sections, table

DOCS = ROOT / "docs"
FIRST = next(block for block in blocks(ROOT / "README.md", "yaml") if block.name == "first.yaml")


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), target
        if anchor:
            assert anchor in anchors(aim), target


def test_every_test_that_is_named_exists():
    files = list((ROOT / "tests").rglob("*.py"))
    defined = {path.stem for path in files}
    for path in files:
        defined.update(re.findall(r"^(?:def |class |)(test_\w+|Test\w+)\b", path.read_text(), re.MULTILINE))
    for page in pages():
        assert set(re.findall(r"\b(?:test_\w+|Test[A-Z]\w+)\b", prose(page))) <= defined, page


# Examples.


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "real-mode.md"], ids=name_of)
def test_engines_are_installed_where_they_run(page):
    (block,) = [block for block in blocks(page, "sh", "bash") if "pip install" in block.text and "pdreal" in block.text]
    paths = re.findall(r"^pdreal \w+ (\S+\.yaml)", block.text, re.MULTILINE)
    transports = {load_scenario(ROOT / path).network.transport for path in paths}
    assert transports
    for engine in ("mooncake", "nixl"):
        is_used = any(transport.startswith(engine) for transport in transports)
        assert is_used is (engine in block.text), engine


SHOWN = [block for page in pages() for block in blocks(page, "yaml")]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: f"{name_of(block.page)}:{block.line}")
def test_yaml_that_is_shown_is_valid(block):
    """A scenario, or the part of one; hosts; profiles and catalog entries are known by their fields."""
    data = parse_yaml(block.text, name_of(block.page))
    first = parse_yaml(FIRST.text, "README.md")
    if "aggregated" in data:
        del first["prefill"], first["decode"]
    if "provenance" in data or "sources" in data:
        return
    if "hosts" in data:
        Hosts.model_validate(data)
        return
    if "variants" in data:
        suite_of(SuiteFile.model_validate(data), block.page)
        return
    if "scenario" in data:
        SweepFile.model_validate(data)
        return
    use = str((data.get("workload") or {}).get("use"))
    if block.name == "pair.yaml":  # tests/test_calibration_guide.py runs it
        return
    if ":" in use or "my_policies" in block.text:  # tests/test_contributing.py runs these
        return
    parse_scenario({**first, **data}, base=block.page.parent)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with the README's scenario cut short."""
    (tmp_path / "first.yaml").write_text(FIRST.text.replace("num_requests: 400", "num_requests: 40"))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_scenarios_of_other_commands_exist():
    for page in pages():
        for line in commands(page):
            words = shlex.split(line, comments=True)
            if words[1] == "run" and words[2].startswith("experiments/"):
                changes = [value for flag, value in pairwise(words) if flag == "--set"]
                load_scenario(ROOT / words[2], changes)


# docs/api.md, docs/formats.md, docs/cli.md.


def test_blocks_of_the_python_page_run(folder, capsys):
    pytest.importorskip("pandas")
    known = {}
    for block in blocks(DOCS / "api.md", "python", "sh"):
        if block.language == "python":
            exec(block.text, known)
        else:
            with suppress(SystemExit):
                main(shlex.split(block.text)[1:])
    captured = capsys.readouterr()
    assert captured.err == ""
    assert {"requests/s", "prefill-0", "GB/s", "count"} <= set(re.findall(r"[\w/-]+", captured.out))
    assert (folder / "overview.png").is_file()


def test_every_public_name_and_figure_is_documented():
    rows = [plain(row[0]).partition("(")[0] for row in table(prose(DOCS / "api.md"))]
    assert set(pdsim.__all__) - {"__version__"} <= set(rows)
    figures = {name for name, made in vars(plots).items() if callable(made) and made.__module__ == plots.__name__}
    assert {name for name in figures if name.startswith("draw_") or made_figure(name)} <= set(rows)
    assert {row for row in rows if row.islower()} <= {*vars(plots), *pdsim.__all__, *TABLES}


def made_figure(name):
    return inspect.signature(getattr(plots, name)).return_annotation is plots.Figure


def run_commands(page, capsys):
    """Each prints something, and no error."""
    for line in commands(DOCS / page):
        with suppress(SystemExit):
            main(shlex.split(line, comments=True)[1:])
        captured = capsys.readouterr()
        assert captured.err == "", line
        assert captured.out, line


def test_commands_that_export_run(folder, capsys):
    run_commands("formats.md", capsys)


def test_the_site_has_every_command_and_flag():
    text = reference()
    for app in (pdsim_app, pdreal_app):
        for name in (name for name in app if not name.startswith("-") and app[name].show):
            assert f"### {app.name[0]} {name}\n" in text
            for argument in app[name].assemble_argument_collection(parse_docstring=True):
                assert not argument.show or argument.name in text or argument.name.strip("-").upper() in text


@pytest.mark.parametrize("app", [pdsim_app, pdreal_app], ids=lambda app: app.name[0])
def test_every_parameter_of_every_command_has_help(app):
    for name in app:
        if name.startswith("-"):
            continue
        for argument in app[name].assemble_argument_collection(parse_docstring=True):
            if "*" in argument.names:  # a value of several flags: each is an argument of its own
                continue
            assert argument.parameter.help, f"{name} {argument.name}"
            assert ("--out" in argument.names) == ("-o" in argument.names), name


# docs/sweeps.md.


@pytest.fixture
def sweeps(folder):
    for block in blocks(DOCS / "sweeps.md", "yaml"):
        (folder / block.name).write_text(block.text)
    return folder


def test_the_sweeps_that_are_shown_run(sweeps, capsys):
    run_commands("sweeps.md", capsys)


def test_the_reports_that_are_shown_are_written(folder, capsys):
    run_commands("reports.md", capsys)
    assert {"first.html", "report.html"} <= {path.name for path in folder.iterdir()}


def test_python_of_sweeps_runs_and_duckdb_reads_the_shards(sweeps, capsys):
    (block,) = blocks(DOCS / "sweeps.md", "python")
    known = {}
    exec(block.text, known)
    assert "requests/s per GPU" in capsys.readouterr().out
    duckdb = pytest.importorskip("duckdb")
    (query,) = blocks(DOCS / "sweeps.md", "sql")
    shards = [run.row for point in known["result"].points for run in point.replications]
    usable = [row["p99_ttft_ms"] for row in shards if row["status"] == "ok" and not row["saturated"]]
    assert [row[-2] for row in duckdb.sql(query.text).fetchall()] == sorted(usable)
    assert usable


# docs/ask.md.


@pytest.mark.pages
@pytest.mark.parametrize("line", commands(DOCS / "ask.md"))
def test_the_questions_that_are_shown_are_answered(line, folder, capsys):
    """Cut short: answers and their numbers are other ones."""
    words = shlex.split(re.sub(r"--seeds \d+", "", line), comments=True)[1:]
    if len(words) > 1:
        size = "num_sessions=8" if words[1] == "local-prefill" else "num_requests=16"
        words += ["--set", f"workload.{size}", "--seeds", "1", "--jobs", "1"]
    with suppress(SystemExit):
        main(words)
    captured = capsys.readouterr()
    assert captured.err == "", line
    assert captured.out, line


# docs/metrics.md, docs/fields.md and docs/invariants.md.


def test_every_number_of_a_summary_and_every_column_is_documented(folder, capsys):
    with suppress(SystemExit):
        main(["run", "first.yaml", "--set", "workload.num_requests=20", "--out", "run"])
    capsys.readouterr()
    summary = read_summary(folder / "run")
    for section, fields in (("summary", summary), ("summary.pdsim", summary["pdsim"])):
        known = [row[0].replace("*", "(mean|median|std|p90|p95|p99)") for row in entry(section).rows]
        same = "total_(input_(text|vision)_tokens|output_tokens_retokenized)"
        assert not [name for name in fields if not re.fullmatch("|".join([*known, same]), name)]
    documented = {name for row in table(prose(DOCS / "metrics.md")) for name in re.findall(r"`([\w./-]+)`", row[0])}
    assert {path.name for path in (folder / "run").iterdir()} <= documented
    for path in (folder / "run").glob("*.parquet"):
        assert [row[0] for row in entry(path.stem).rows] == parquet.read_schema(path).names


def test_every_stage_is_documented():
    assert set(STAGES) <= set(re.findall(r"`(\w+)`", sections(DOCS / "metrics.md")["Stages"]))


def test_every_invariant_is_documented():
    code = (ROOT / "pdsim" / "core" / "invariants.py").read_text()
    documented = {row[0] for row in table(prose(DOCS / "invariants.md")) if re.fullmatch(r"[A-Z]+-\d+", row[0])}
    assert documented == set(re.findall(r'"([A-Z]+-\d+)"', code))

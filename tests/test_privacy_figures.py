"""docs/privacy.md has a row for every figure of privacy that the code tells, and for no other.

What the code tells is read from its source: who asks an accountant or an attack for a figure, and
whose text or keys name an epsilon. Each such function has a place below, under the name of the row.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from digits_runs import EVERYTHING, SAMPLE, configuration, summary_of
from rich.console import Console

from blackthorn.installation import APP_ROOT
from blackthorn.launch.commands.simulate import simulate
from blackthorn.recording.client_history import read_lines

ROOMS = sorted(path.name for path in APP_ROOT.iterdir() if path.is_dir())
# Who is asked for a figure of privacy.
ASKED = {
    *("spent", "figure", "local_figure", "calibrate", "calibrated", "lower_bound"),
    *("one_shot_epsilon", "gaussian_pair_epsilon", "gaussian_epsilon", "composed_epsilon"),
}
NAMES_ONE = re.compile("epsilon|ε")
# Where they are computed, and no more than that; what is thrown; the declarations of keys.
COMPUTED = ("strategies/accounting.py", "strategies/privacy_loss.py", "simulation/auditing.py")
# In what a figure is told, by the words of the table's second column.
PLACES = (
    *("`summary.json`", "`metrics.jsonl`", "`operator.jsonl`", "`ledger.json`", "`config.toml`"),
    *("terminal", "report", "TensorBoard", "MLflow", "`blackthorn status`", "Python", "JSON"),
    *("client's own output", "`blackthorn runs`", "`/metrics`"),
)
_PROGRESS = "launch/commands/progress.py: "
_FACTS = "reporting/report_facts.py: "
_SCALARS = {
    "TensorBoard": ["recording/tensorboard_events.py: TensorBoardEvents.round"],
    "MLflow": ["recording/mlflow_run.py: MlflowRun.round"],
}
_OF_RUNS = {
    "`blackthorn runs`": [f"launch/commands/runs.py: {name}" for name in ("_show", "_as_json")],
    "`/metrics`": [
        "recording/run_figures.py: _epsilons",
        "launch/federation/measures.py: <module>",
    ],
}
# Row -> place -> the functions by which the figure gets there.
TOLD: dict[str, dict[str, list[str]]] = {
    "privacy.epsilon": {
        "`summary.json`": ["recording/privacy.py: _entry", "recording/privacy.py: privacy_entry"],
        "MLflow": ["recording/mlflow_run.py: MlflowRun.finish"],
        "terminal": [
            "launch/federation/run_log.py: privacy_said",
            "recording/run_ledger.py: _spent",
            "recording/run_ledger.py: check_ledger",
        ],
        "report": [
            *(_FACTS + "_spent", _FACTS + "_clients_privacy", _FACTS + "<module>"),
            "reporting/comparison.py: _ends",
            *(f"launch/commands/sweep_results.py: {f}" for f in ("_row", "table_of", "csv_of")),
        ],
        "`blackthorn status`": ["launch/federation/status.py: spent_said"],
        **_OF_RUNS,
    },
    "epsilon_rdp": {
        "`metrics.jsonl`": ["recording/privacy.py: spent_so_far"],
        "`ledger.json`": [
            "strategies/ledger.py: Ledger._content",
            "strategies/ledger.py: Ledger._quick_epsilon",
        ],
        "terminal": [_PROGRESS + "quality", _PROGRESS + "_Bar.show"],
        "report": [
            "reporting/report_privacy.py: spent_by_round",
            "reporting/report_privacy.py: _drawn",
            "reporting/plots.py: plot_epsilon",
            "reporting/run_plots.py: <module>",
            "reporting/run_report.py: <module>",
            "reporting/run_report.py: _privacy",
            _FACTS + "_spent",
        ],
        **_SCALARS,
        "`blackthorn status`": [
            "recording/operator_log.py: RoundTold.round",
            "launch/federation/status.py: spent_said",
        ],
    },
    "epsilon": {
        "`config.toml`": ["settings/keys/privacy.py: Privacy"],
        "`summary.json`": ["recording/privacy.py: _entry"],
        "terminal": [
            "recording/run_ledger.py: _budget",
            "recording/resume.py: _rounds_are_fixed_by",
            "strategies/ledger.py: Ledger.last_round",
            "strategies/ledger.py: Ledger.allows",
            "recording/privacy.py: privacy_plan",
        ],
    },
    "privacy.local.epsilon": {
        "`summary.json`": ["recording/privacy.py: _entry"],
        "report": [_FACTS + "_claim"],
    },
    "sample_privacy.epsilon": {
        "`summary.json`": [
            "recording/privacy.py: sample_privacy_entry",
            "recording/privacy.py: believed_figures",
        ],
        "terminal": ["launch/federation/run_log.py: privacy_said"],
        "report": [_FACTS + "_claim"],
        "`blackthorn status`": ["launch/federation/status.py: spent_said"],
        **_OF_RUNS,
    },
    "sample_epsilon": {
        "`metrics.jsonl`": [
            "recording/round_entries.py: _cohort_entry",
            "recording/round_entries.py: <module>",
            "client_app/dp_sgd.py: sample_epsilon",
            "client_app/dp_sgd.py: DPSGD.figure",
        ],
        "`operator.jsonl`": ["recording/round_entries.py: operator_entry"],
        **_SCALARS,
    },
    "strategy.figure()": {
        "Python": [
            "strategies/private_averaging.py: PrivateAveraging.figure",
            "strategies/ledger.py: Ledger.figure",
            "strategies/privacy_plan.py: PrivacyPlan.figure",
        ]
    },
    "strategy.local_figure()": {
        "Python": [
            "strategies/private_averaging.py: PrivateAveraging.local_figure",
            "strategies/privacy_plan.py: PrivacyPlan.local_figure",
        ]
    },
    "spent": {
        "Python": [
            "strategies/accounting.py: spent",
            "strategies/accounting.py: calibrate_noise_multiplier",
            "strategies/privacy_plan.py: calibrated",
        ]
    },
    "blackthorn calibrate dp": {
        "terminal": ["launch/commands/calibrate.py: dp", "launch/commands/calibrate.py: dp.figure"]
    },
    "blackthorn plan-privacy": {
        "terminal": [
            "launch/commands/plan_privacy.py: _print",
            "reporting/privacy_options.py: compare",
            "reporting/privacy_options.py: _plan",
            "reporting/privacy_options.py: _for_messages",
        ]
    },
    "blackthorn audit": {
        "terminal": ["launch/commands/audit.py: _figure"],
        "JSON": [
            "simulation/noise_audit.py: attack_local_claim",
            "simulation/privacy_audit.py: _Central._claimed",
            "simulation/privacy_audit.py: _Central.lonely_runs",
            "simulation/privacy_audit.py: _Central.one_shot",
            "simulation/privacy_audit.py: _Central.short_runs",
            "simulation/sample_audit.py: attack_sample_claim",
        ],
    },
    "max-local-epsilon": {"client's own output": ["client_app/policy.py: Policy.check_sent"]},
    "blackthorn reproduce": {"report": ["experiments/page.py: write_report"]},
}
# Rows of figures that are no epsilon, and who tells them.
OTHERS = {
    "blackthorn pilot": "launch/commands/pilot.py: pilot_report",
    "blackthorn predict": "launch/commands/predict.py: predict",
    "accuracy": "recording/round_entries.py: metrics_of",
    "warnings": "server_app/useless_noise.py: useless_noise",
}
# Functions that name an epsilon and tell none, and why.
NONE_OF_A_RUN = {
    "blackthorn/wire.py: <module>": "names of records",
    "launch/commands/pilot.py: <module>": "a pilot has no noise: keys that it switches off",
    "launch/commands/calibrate.py: <module>": "an example of a command",
    "server_app/useless_noise.py: useless_noise": "advises a larger one",
    "settings/privacy_checks.py: _check_charged": "keys that are refused",
    "settings/privacy_checks.py: _check_unused": "keys that are refused",
    "strategies/privacy_plan.py: PrivacyPlan.__post_init__": "the plan's own number",
    "strategies/secure_averaging.py: _cost": "what a client compares with its budget",
    "strategies/privacy_plan.py: <module>": "the words of a claim that is none",
    "strategies/schedules.py: private_schedule": "the schedule's own number",
}


def sources(root: Path) -> dict[str, str]:
    """The product's modules, by their place."""
    files = [*(root / "blackthorn").glob("*.py")]
    files += [path for room in ROOMS for path in (root / room).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


def sites(modules: Mapping[str, str]) -> set[str]:
    """`path: function` of all that ask for a figure of privacy, or whose text or keys name one."""
    found = set()
    for path, text in modules.items():
        if path not in COMPUTED:
            found |= {f"{path}: {function}" for function in _of_text(text)}
    return found


@cache
def _of_text(text: str) -> frozenset[str]:
    return frozenset(_sites(ast.parse(text)))


def _sites(module: ast.Module) -> Iterator[str]:
    for function, node in _code(module, ()):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ASKED:
                yield function
        if isinstance(node, ast.Attribute) and node.attr == "epsilon_rdp":
            yield function
        if isinstance(node, ast.Constant) and NAMES_ONE.search(str(node.value)):
            yield function


def _code(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """All nodes with the function that they are in, but for docstrings, types, what is thrown
    without a figure that is asked for in it, and the help of options."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    for child in ast.iter_child_nodes(node):
        docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        thrown = isinstance(child, ast.Raise) and not _asks(child)
        if docstring or thrown or isinstance(child, ast.arguments):
            continue
        yield ".".join(inside) or "<module>", child
        yield from _code(child, inside)


def _asks(node: ast.AST) -> bool:
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return any(isinstance(call, ast.Attribute) and call.attr in ASKED for call in calls)


def rows(page: str) -> list[tuple[list[str], str]]:
    """Of the table: the names that a row's first cell has, and its second cell."""
    section = page.partition("## Who may be the adversary")[2].partition("\nBeside these")[0]
    table = section.partition("| --- |")[2]
    cells = [line.split("|") for line in table.splitlines()[1:] if line.startswith("|")]
    return [(re.findall("`([^`]+)`", row[1]) or [row[1].split()[0]], row[2]) for row in cells]


def check_page(page: str, modules: Mapping[str, str]) -> None:
    """Every figure has a row, every row a figure, and each says where it is told."""
    told = {site for places in TOLD.values() for those in places.values() for site in those}
    unknown = {s for s in sites(modules) - told - {*NONE_OF_A_RUN} if "experiments/" not in s}
    assert unknown == set(), "these tell a figure of privacy that has no row"
    table = rows(page)
    named = [names[0] for names, _ in table]
    assert {*named} == {*TOLD, *OTHERS}
    for names, where in table:
        if names[0] in OTHERS or where.strip().startswith("the same"):
            continue
        assert {place for place in PLACES if place in where} == {*TOLD[names[0]]}, names[0]


@pytest.fixture(scope="module")
def modules(repository: Path) -> dict[str, str]:
    return sources(repository)


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "privacy.md").read_text()


def test_every_figure_of_privacy_has_a_row_and_every_row_a_figure(
    page: str, modules: dict[str, str]
) -> None:
    check_page(page, modules)


def test_who_is_said_to_tell_a_figure_is_there(modules: dict[str, str]) -> None:
    listed = [site for places in TOLD.values() for those in places.values() for site in those]
    for site in [*listed, *OTHERS.values()]:
        path, _, function = site.partition(": ")
        last = function.split(".")[-1]
        defined = re.search(rf"\b(def|class) {last}\b", modules[path])
        assert function == "<module>" or defined, site
    assert set() == {*NONE_OF_A_RUN} - sites(modules), "these name no epsilon any more"


def _with(path: str, code: str) -> Callable[[str, dict[str, str]], tuple[str, dict[str, str]]]:
    return lambda page, modules: (page, {**modules, path: modules[path] + code})


def _row(old: str, new: str) -> Callable[[str, dict[str, str]], tuple[str, dict[str, str]]]:
    def change(page: str, modules: dict[str, str]) -> tuple[str, dict[str, str]]:
        assert old in page
        return page.replace(old, new), modules

    return change


MUTATIONS = {
    "a figure in a new line": _with(
        "launch/commands/pilot.py", '\ndef more(f):\n    return f"epsilon {f.epsilon}"\n'
    ),
    "a new key": _with(
        "recording/run_counts.py", '\ndef more(f):\n    return {"round_epsilon": f}\n'
    ),
    "a figure that is asked for": _with(
        "recording/suspects.py", "\ndef more(plan):\n    return plan.local_figure()\n"
    ),
    "a row is gone": _row("| `sample_epsilon` |", "not a row"),
    "a row too many": _row(
        "| `epsilon_rdp` |",
        "| `privacy.cohort.epsilon` | the report | nobody | |\n| `epsilon_rdp` |",
    ),
    "a place that is gone": _row("the report's curve, TensorBoard, MLflow", "TensorBoard, MLflow"),
    "a place too many": _row(
        "claim; TensorBoard, MLflow", "claim; the report, TensorBoard, MLflow"
    ),
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_figure_without_a_row_and_a_row_without_a_figure_are_found(
    change: Callable[[str, dict[str, str]], tuple[str, dict[str, str]]],
    page: str,
    modules: dict[str, str],
) -> None:
    with pytest.raises(AssertionError):
        check_page(*change(page, modules))


def beside(page: str) -> set[str]:
    """The keys that the page explains."""
    section = page.partition("## Who may be the adversary")[2].partition("\n## ")[0]
    return set(re.findall("`([a-z_]+)`", section))


def _keys(entry: Any) -> Iterator[str]:
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        yield key
        yield from _keys(value)


def test_every_key_beside_a_figure_is_explained(page: str, tmp_path: Path) -> None:
    """What stands in the summary's entries of privacy and, of privacy, in a round's line."""
    options = {**EVERYTHING, **SAMPLE, "noise_location": "client", "noise_multiplier": 30.0}
    plain = {*_lines(configuration(tmp_path / "plain", num_server_rounds=1))}
    private = {*_lines(configuration(tmp_path / "private", **options, num_server_rounds=1))}
    summary = summary_of(tmp_path / "private")
    keys = {*_keys(summary["privacy"]), *_keys(summary["sample_privacy"]), *(private - plain)}
    assert {"covers_clients", "local", "epsilon_rdp", "signal_to_noise"} <= keys
    assert keys - beside(page) == set()


def _lines(config: Any) -> Iterator[str]:
    simulate(config, Console(quiet=True))
    for line in read_lines(Path(config.output_dir) / "metrics.jsonl"):
        yield from line


def test_every_key_that_an_entry_of_privacy_may_have_is_explained(
    page: str, modules: dict[str, str]
) -> None:
    """Also those of other plans than one run's: by the source of what writes the entries."""
    module = ast.parse(modules["recording/privacy.py"])
    keys = {
        key.value
        for function, node in _code(module, ())
        if isinstance(node, ast.Dict) and function != "privacy_plan"
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert {"groups", "update_noise_multiplier", "epsilon"} <= keys
    assert {str(key) for key in keys} - beside(page) == set()

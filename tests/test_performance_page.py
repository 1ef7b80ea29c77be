"""docs/performance.md is the one record of what was measured, and `make benchmark` reads it.

Nothing is timed here: what is measured has stand-ins.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks import against_the_record, recorded_figures, start_times
from benchmarks.against_the_record import FACTOR, PIECES, Line, Piece, apart
from benchmarks.aggregation_workload import draw_updates, our_rules
from benchmarks.aggregators_against_peers import rows
from benchmarks.instruction_counts import NotCounted, counts, read_counts
from benchmarks.recorded_figures import (
    MILLIONS,
    PAGE,
    SIZES,
    TIMES_BYZFL,
    TIMES_FLOWER,
    TIMES_IMPORT,
    TIMES_RAY,
    UNITS,
    RecordChanged,
)
from benchmarks.short_forms import ENGINE_WORKLOADS, Measured
from benchmarks.valgrind_requests import RUNNING_ON_VALGRIND, Requests
from benchmarks.workloads import WORKLOADS

TEXT = PAGE.read_text(encoding="utf-8")
UPDATES = draw_updates(16, 10, 2)


def test_every_workload_of_the_engine_has_a_figure_with_each_peer() -> None:
    found = recorded_figures.engine_figures(TEXT)
    assert found.keys() == {(w, m) for w in ENGINE_WORKLOADS for m in (TIMES_RAY, "times pfl")}
    assert set(ENGINE_WORKLOADS) < WORKLOADS.keys()
    assert all(value is not None and value > 0 for value in found.values())


def test_every_rule_has_its_units_at_each_size_and_each_peer_that_has_it() -> None:
    expected = set()
    for size in SIZES:
        for row in rows(UPDATES, 2):
            expected.add((f"{row.rule}, {size}", UNITS))
            expected |= {(f"{row.rule}, {size}", TIMES_BYZFL)} if row.byzfl else set()
            expected |= {(f"{row.rule}, {size}", TIMES_FLOWER)} if row.flower else set()
    found = recorded_figures.rule_figures(TEXT)
    assert found.keys() == expected
    assert all(value is not None and value > 0 for value in found.values())


def test_a_round_over_grpc_is_compared_with_fedavg_on_the_same_grid() -> None:
    row = "| 2e4 | 2.00 | 13.11 | 14.7 | 5.00 | -18.8 % | 3.06 |"
    (line,) = [line for line in TEXT.splitlines() if line.startswith("| 2e4 |")]
    found = recorded_figures.round_figures(TEXT.replace(line, row))
    assert list(found.values()) == [2.5]


def test_every_command_that_is_started_has_a_row(tmp_path: Path) -> None:
    found = recorded_figures.start_figures(TEXT)
    assert found.keys() == {(name, TIMES_IMPORT) for name in start_times.commands(tmp_path)}


def test_every_rule_s_instructions_have_a_row() -> None:
    found = recorded_figures.count_figures(TEXT)
    assert found.keys() == {(rule, MILLIONS) for rule in our_rules(UPDATES, 2)}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize(
    ("old", "new"),
    [("\n## ", "\n## Now "), (" | ", " | other | "), ("\n| ", "\n* ")],
    ids=["headings", "columns", "tables"],
)
def test_a_page_that_has_changed_is_an_error(piece: Piece, old: str, new: str) -> None:
    with pytest.raises(RecordChanged, match=r"docs/performance\.md"):
        piece.recorded(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("read", "old"),
    [
        (recorded_figures.rule_figures, "K = 50, d = 1e6:"),
        (recorded_figures.rule_figures, " ms ("),
        (recorded_figures.round_figures, "| 2e4 |"),
    ],
)
def test_a_number_that_is_gone_is_an_error(read: Callable[[str], object], old: str) -> None:
    with pytest.raises(RecordChanged, match=r"docs/performance\.md"):
        read(TEXT.replace(old, "| about |" if old.startswith("|") else "about"))


@pytest.mark.parametrize(
    ("measure", "recorded", "now", "mark"),
    [
        (TIMES_RAY, 60.0, 60.0 / FACTOR + 1, ""),
        (TIMES_RAY, 60.0, 60.0 / FACTOR - 1, "slower"),
        (TIMES_RAY, 60.0, 600.0, ""),
        (UNITS, 2.0, 2.0 * FACTOR - 0.1, ""),
        (UNITS, 2.0, 2.0 * FACTOR + 0.1, "slower"),
        (UNITS, 2.0, 0.2, ""),
        (TIMES_IMPORT, 2.0, 2.0 * FACTOR + 0.1, "slower"),
        (MILLIONS, 200.0, 215.0, ""),
        (MILLIONS, 200.0, 225.0, "slower"),
        (UNITS, None, 9.0, ""),
        (UNITS, 2.0, "not installed", ""),
        (UNITS, 2.0, None, "failed"),
        (UNITS, None, None, "failed"),
    ],
)
def test_what_is_worse_than_the_page_or_has_failed_is_marked(
    measure: str, recorded: float | None, now: float | str | None, mark: str
) -> None:
    line = Line(("it", measure), now, recorded)
    assert line.mark == mark
    assert line.cells()[-1] == mark


def stand_in(measure: Callable[[], Measured]) -> Piece:
    return Piece(lambda _: {("a", UNITS): 1.0, ("b", UNITS): 2.0}, measure)


def missing() -> Measured:
    raise NotCounted("no valgrind")


def broken() -> Measured:
    raise RuntimeError("the measured process has died")


@pytest.mark.parametrize(
    ("measure", "marks"),
    [
        (lambda: {("a", UNITS): 1.2, ("b", UNITS): 9.0}, {"a": "", "b": "slower"}),
        (lambda: {("b", UNITS): 2.0}, {"a": "failed", "b": ""}),
        (
            lambda: {("a", UNITS): 1.0, ("b", UNITS): 2.0, ("c", UNITS): 3.0},
            dict.fromkeys("abc", ""),
        ),
        (missing, {"a": "", "b": ""}),
        (broken, {"a": "failed", "b": "failed"}),
    ],
)
def test_every_figure_of_page_and_measurement_has_a_row(
    measure: Callable[[], Measured], marks: dict[str, str]
) -> None:
    found = against_the_record.compared(stand_in(measure), TEXT)
    assert {line.key[0]: line.mark for line in found} == marks


def test_every_piece_is_measured_in_a_process_of_its_own() -> None:
    for piece in PIECES.values():
        assert isinstance(piece.measure, partial) and piece.measure.func is apart
    assert partial(apart, os.getpid)() != os.getpid()
    with pytest.raises(NotCounted, match="no valgrind"):
        apart(missing)


@pytest.mark.parametrize(
    ("b", "code", "said"), [(2.1, 0, "2.10"), (4.0, 1, "1 of 2 figures"), ("absent", 0, "absent")]
)
def test_the_exit_code_is_1_where_a_figure_is_marked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    b: float | str,
    code: int,
    said: str,
) -> None:
    piece = stand_in(lambda: {("a", UNITS): 1.0, ("b", UNITS): b})
    monkeypatch.setitem(PIECES, "rules", piece)
    monkeypatch.setattr(sys, "argv", ["against_the_record", "--only", "rules"])
    try:
        against_the_record.main()
        ended = 0
    except SystemExit as error:
        ended = int(error.code or 0)
    assert ended == code
    assert said in capsys.readouterr().out


def test_all_pieces_are_measured_unless_some_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def note(name: str) -> Piece:
        def measure() -> Measured:
            done.append(name)
            return {}

        return Piece(lambda _: {}, measure)

    for name in list(PIECES):
        monkeypatch.setitem(PIECES, name, note(name))
    monkeypatch.setattr(sys, "argv", ["against_the_record"])
    against_the_record.main()
    assert done == list(PIECES)
    monkeypatch.setattr(sys, "argv", ["against_the_record", "--only", "nothing"])
    with pytest.raises(SystemExit):
        against_the_record.main()
    said = " ".join(capsys.readouterr().err.split())
    assert f"there is no nothing: {', '.join(PIECES)}" in said


def test_counts_are_read_with_the_names_under_which_they_were_asked_for() -> None:
    begins = "version: 1\npid: 7\ndesc: Trigger: "
    ends = "\npositions: line\nevents: Ir\nsummary: {}\nfn=(1) f\n3 100\ntotals: 999\n"
    dumps = (
        f"{begins}Client Request: RAGE, nobody corrupt{ends.format(2400000)}",
        f"{begins}Client Request: mean{ends.format(17)}",
        f"{begins}Program termination{ends.format(5)}",
    )
    assert read_counts(dumps) == {"RAGE, nobody corrupt": 2400000, "mean": 17}


def test_without_valgrind_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotCounted, match=r"valgrind|x86-64"):
        counts()


ON_X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's instructions")


@ON_X86_64
def test_a_request_to_valgrind_does_nothing_without_it() -> None:
    done: list[int] = []
    requests = Requests()
    requests.count("it", lambda: done.append(1))
    assert (done, requests.send(RUNNING_ON_VALGRIND)) == ([1], 0)


COUNTED = """
from benchmarks.valgrind_requests import Requests
requests = Requests()
for name, terms in (("little", 10), ("much", 10_000)):
    requests.count(name, lambda: sum(range(terms)))
"""


@ON_X86_64
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_counts_a_call_and_nothing_else(repository: Path, tmp_path: Path) -> None:
    options = ("--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={tmp_path}/out")
    command = ["valgrind", *options, sys.executable, "-c", COUNTED]
    subprocess.run(command, cwd=repository, capture_output=True, timeout=120, check=True)
    found = read_counts(path.read_text() for path in tmp_path.glob("out.*"))
    assert found.keys() == {"little", "much"}
    # An addition is dozens of instructions, and a Python that starts many millions.
    assert 0 < found["little"] < 200_000 < found["much"] < 2_000_000

"""What is told of a run to whoever watches many; of one under a claim, what may be released."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from digits_runs import PRIVATE, SAMPLE, run, summary_of

from blackthorn.flower_port.transports import LATE, UNSENT
from blackthorn.recording.run_figures import OTHER, REASON_CLASSES, reason_class, run_figures
from blackthorn.strategies import screening

ATTACKED: dict[str, Any] = {"attack": "nan", "num_byzantine": 1, "num_server_rounds": 2}


def test_figures_are_the_sums_of_what_the_rounds_lines_say(tmp_path: Path) -> None:
    lines = run(tmp_path, **ATTACKED)
    found = run_figures(tmp_path, over=False)
    assert (found.claimed, found.planned, found.rounds, found.skipped) == (False, 2, 2, 0)
    assert found.replies == {("kept", ""): 6, ("rejected", "values"): 2}
    phases = {phase for line in lines for phase in line["seconds"]}
    assert found.seconds.keys() == phases and phases
    for phase in phases:
        assert found.seconds[phase] == pytest.approx(sum(one["seconds"][phase] for one in lines))
    assert found.epsilons == {}


def test_a_round_that_was_done_twice_counts_once_and_a_torn_line_not(tmp_path: Path) -> None:
    run(tmp_path, **ATTACKED)
    path = tmp_path / "metrics.jsonl"
    before, last = run_figures(tmp_path, over=True), path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + last + "\n" + last[:20])
    assert run_figures(tmp_path, over=True) == before


def test_of_a_run_under_a_claim_nothing_is_told_of_the_cohort_and_nothing_before_it_is_over(
    tmp_path: Path,
) -> None:
    run(tmp_path, **PRIVATE)
    under_way = run_figures(tmp_path, over=False)
    assert (under_way.claimed, under_way.planned) == (True, 3)
    assert under_way.rounds is under_way.skipped is None
    assert not under_way.seconds and not under_way.replies and not under_way.epsilons
    over = run_figures(tmp_path, over=True)
    assert (over.rounds, over.skipped, over.seconds, over.replies) == (3, None, {}, {})
    epsilon = summary_of(tmp_path)["privacy"]["epsilon"]
    assert epsilon > 0
    assert over.epsilons == {"client": epsilon}


def test_the_epsilon_of_examples_is_told_by_that_name(tmp_path: Path) -> None:
    run(tmp_path, num_server_rounds=1, **SAMPLE)
    found = run_figures(tmp_path, over=True)
    assert found.epsilons == {"example": summary_of(tmp_path)["sample_privacy"]["epsilon"]}


def test_a_run_whose_configuration_cannot_be_read_is_taken_for_one_under_a_claim(
    tmp_path: Path,
) -> None:
    run(tmp_path, num_server_rounds=1)
    for text in ("", "no-such-key = 1\n", "torn = "):
        (tmp_path / "config.toml").write_text(text)
        assert run_figures(tmp_path, over=True).claimed
    (tmp_path / "config.toml").unlink()
    assert run_figures(tmp_path, over=True).claimed
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"


def reasons_of_screening() -> list[str]:
    """What screening says of replies, with something in place of what it fills in."""
    tree = ast.parse(Path(screening.__file__).read_text())
    raised = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "RejectedReply"
    ]
    found = []
    for text in raised:
        if isinstance(text, ast.Constant):
            found.append(str(text.value))
        elif isinstance(text, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "7" for p in text.values]
            found.append("".join(map(str, parts)))
    return found


def test_every_reason_of_screening_has_a_class_and_what_clients_write_makes_none() -> None:
    reasons = reasons_of_screening()
    assert len(reasons) > 12
    # Of some a first word of ours is filled in.
    known = [
        re.sub("^7 = ", "num-examples = ", reason.replace("the reply 7", "the reply attests"))
        for reason in reasons
    ]
    assert [r for r in known if reason_class(r) == OTHER] == []
    assert {reason_class(reason) for reason in (LATE, UNSENT)} == {"no reply"}
    assert reason_class("error 2: no reply by the deadline") == "error"
    assert reason_class("a new\nlabel") == OTHER
    assert set(map(reason_class, known)) < set(REASON_CLASSES)

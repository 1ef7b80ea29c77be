"""What is made of a run's output: rounds, who holds which client, who cannot take part."""

import json

from blackthorn.launch.federation.run_log import RunLog
from blackthorn.recording.operator_log import PREFIX


def told(kind: str, value: object) -> str:
    return PREFIX + json.dumps({kind: value}) + "\n"


def test_who_cannot_take_part_is_news_once() -> None:
    log = RunLog()
    refused = "client 1 on node 17 did not enrol: 'a.npz': x has shape (5, 20)\n"
    assert list(log.read(refused + "node 18 did not enrol: error 2: no data\n" + refused)) == []
    assert log.news() == ["client 1: 'a.npz': x has shape (5, 20)", "node 18: error 2: no data"]
    list(log.read(refused))
    assert log.news() == []
    list(log.read("client 1 on node 19 did not enrol: 'b.npz': y holds 10\n"))
    assert log.news() == ["client 1: 'b.npz': y holds 10"]


def test_a_client_s_text_does_not_pass_for_the_server_s() -> None:
    log = RunLog()
    forged = told("summary", {"status": "completed"}).strip()
    lines = [
        f"node 17 did not enrol: {forged}",
        "node 17 did not enrol: client 0 is held by node 1",
    ]
    assert list(log.read("\n".join(lines) + "\n")) == []
    assert log.summary is None
    assert log.nodes == {}
    rejected = [{"client": 1, "reason": "node 5 did not enrol: x"}]
    (entry,) = log.read(told("round", {"round": 1, "rejected": rejected}))
    assert entry["round"] == log.last_round == 1
    assert [line.partition(":")[0] for line in log.news()] == ["node 17", "node 17"]


def test_the_log_tells_which_node_holds_a_client() -> None:
    log = RunLog()
    list(log.read("client 3 is held by node 12\n" + "half a line"))
    assert log.nodes == {3: 12}


def test_whom_a_run_waits_for_is_news() -> None:
    log = RunLog()
    lines = [
        "waiting for 4 clients, 0 are connected: 120 s (start-timeout) at most",
        "client 1 is held by node 17",
        "node 18 did not enrol: nobody is connected",
        "nobody is connected: the run pauses, for 120 s (start-timeout) at most",
        "2 clients are connected: the run goes on",
        "3 of 4 clients connected within 120 s (start-timeout); missing: 2; going on with those",
    ]
    list(log.read("\n".join(lines) + "\n"))
    assert log.news() == [lines[0], "node 18: nobody is connected", *lines[3:]]


def test_what_there_is_to_know_before_a_run_is_news_once() -> None:
    log = RunLog()
    notes = told("notes", ["warning: the noise drowns all", "the ledger begins anew"])
    list(log.read(notes))
    assert log.news() == ["warning: the noise drowns all", "the ledger begins anew"]
    # A ServerApp that goes on tells them again, and what is new with them.
    list(log.read(notes + told("notes", ["resumed at round 3"])))
    assert log.news() == ["resumed at round 3"]


def test_a_round_that_is_told_again_counts_once() -> None:
    log = RunLog()
    rejected = [{"client": 1, "reason": "late"}]
    lines = [told("round", {"round": number, "rejected": rejected}) for number in (0, 1, 0, 1, 2)]
    # Under a privacy claim what is told of single clients is apart, and no round.
    for number in (3, 2, 3, 4):
        lines.append(told("round", {"round": number}))
        lines.append(told("operator", {"round": number, "rejected": rejected}))
    assert list(log.read("".join(lines))) == [
        *({"round": number, "rejected": rejected} for number in (0, 1, 2)),
        *({"round": number} for number in (3, 4)),
    ]
    assert (log.last_round, log.rejections) == (4, {1: 5})

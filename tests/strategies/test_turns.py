"""Clients that take turns: what is released, what it costs, and who may join."""

import errno
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from charged_ledgers import rounds_in
from flwr.app import ConfigRecord
from memory_grid import Answer, MemoryGrid
from noised_rounds import CLIENTS, LR, START, WITHIN, C, D, Z, grid, nothing, replies, state_of
from test_noise_record import dense

from blackthorn.strategies import (
    ClipNorm,
    CohortPlan,
    DPFedAvg,
    DPNormFedAvg,
    Ledger,
    PrivacyPlan,
    RotatingParticipation,
    RoundContext,
    RoundReport,
)
from blackthorn.strategies.accounting import Release, spent
from blackthorn.strategies.durable_file import LockedFile
from blackthorn.strategies.private_averaging import PrivateAveraging
from blackthorn.strategies.rounds import RunOver

B = 4


def plan(**options: Any) -> PrivacyPlan:
    values: dict[str, Any] = {
        "clip_norm": ClipNorm(C),
        "noise_multiplier": Z,
        "num_clients": CLIENTS,
        "rounds": 6,
        "participation": RotatingParticipation(B),
        "bands": B,
    }
    return PrivacyPlan(**{**values, **options})


def released(strategy: PrivateAveraging, rounds: int = 6, **options: Any) -> np.ndarray:
    """r a_t [T, d] of a run of clients that send nothing."""
    seen: list[torch.Tensor] = []

    def see(report: RoundReport) -> None:
        if report.aggregate is not None and report.server_round:
            seen.append(report.aggregate.double() * strategy.privacy.cohort_size)

    strategy._observers.append(see)
    strategy.start(grid(), state_of(START), num_rounds=rounds, timeout=20, **options)
    return torch.stack(seen).numpy()


def build(kind: type[PrivateAveraging] = DPFedAvg, **options: Any) -> PrivateAveraging:
    return kind(plan(), local_rate=LR, statistics="server", **options)


@pytest.mark.parametrize("kind", [DPFedAvg, DPNormFedAvg])
def test_undone_by_the_matrix_the_noise_is_independent_and_of_the_size_charged(
    kind: type[PrivateAveraging],
) -> None:
    fresh = dense(B, 6) @ released(build(kind))
    np.testing.assert_allclose(fresh.std(axis=1), Z * C, rtol=WITHIN)
    correlations = np.corrcoef(fresh) - np.eye(6)
    assert abs(correlations).max() < 5 / np.sqrt(D)


def test_the_noise_of_the_sum_is_smaller_than_with_independent_noise() -> None:
    banded = released(build()).sum(axis=0).std()
    independent = DPFedAvg(plan(bands=1), local_rate=LR, statistics="server")
    assert released(independent).sum(axis=0).std() == pytest.approx(Z * C * 6**0.5, rel=WITHIN)
    assert banded < 0.8 * Z * C * 6**0.5


def test_a_run_costs_as_many_rounds_as_a_client_is_in(tmp_path: Path) -> None:
    strategy = build(ledger=tmp_path / "ledger.json")
    released(strategy)
    assert strategy.ledger.charges == [(strategy.privacy.release(), 6)]
    figure = strategy.figure()
    assert figure is not None
    assert figure.epsilon == spent([(Release(Z), 2)], 1e-5).epsilon == plan().figure().epsilon
    again = Ledger(plan(), tmp_path / "ledger.json")
    assert again.figure() == figure


def test_every_run_of_a_ledger_has_turns_of_its_own(tmp_path: Path) -> None:
    """Two runs of 2 of 4 turns each may have had the same client twice."""
    for _ in range(2):
        released(build(ledger=tmp_path / "ledger.json"), rounds=2)
    figure = Ledger(plan(), tmp_path / "ledger.json").figure()
    assert figure.epsilon == spent([(Release(Z), 2)], 1e-5).epsilon


def test_who_is_asked_hangs_on_the_id_and_the_round_alone() -> None:
    many = plan(num_clients=40)
    everybody = {t: many.draw(range(40), None, t).clients for t in range(1, 9)}  # type: ignore[arg-type]
    assert [len(cohort) for cohort in everybody.values()] == [10] * 8
    assert [everybody[t] for t in range(1, 5)] == [everybody[t] for t in range(5, 9)]
    assert sorted(client for t in range(1, 5) for client in everybody[t]) == list(range(40))
    few = range(0, 40, 3)
    for t, cohort in everybody.items():
        # Late or away: everybody else's turn stays what it was.
        assert many.draw(few, None, t).clients == [c for c in cohort if c in few]  # type: ignore[arg-type]


def again_after(apart: int, patch: pytest.MonkeyPatch) -> None:
    """One client joins again after `apart` rounds, by the draw of every plan."""

    def draw(plan: PrivacyPlan, clients: Any, randomness: Any, server_round: int) -> CohortPlan:
        del plan, clients, randomness
        return CohortPlan.of([10] if server_round in (1, 1 + apart) else [])

    patch.setattr(PrivacyPlan, "draw", draw)


def test_nobody_joins_again_too_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of such a round is charged or released, and the run ends with it."""
    again_after(B - 1, monkeypatch)
    strategy = build(ledger=tmp_path / "ledger.json")
    assert len(released(strategy)) == B - 1
    assert strategy.ledger.rounds == B - 1


def test_after_b_rounds_it_may_join_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again_after(B, monkeypatch)
    strategy = build(ledger=tmp_path / "ledger.json")
    assert len(released(strategy)) == 6


def test_who_joined_is_remembered_by_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    again_after(B - 1, monkeypatch)
    first = build()
    released(first, rounds=B - 1)
    second = build()
    second.restore_own({**first.own_values(), "ledger": second.ledger.mark()})
    context = RoundContext(B, LR, torch.zeros(3), cohort=CohortPlan.of([10]))
    weights = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="a client would join again within 4 rounds"):
        second.combine(torch.zeros(1, 3), weights, context)


def test_a_round_that_was_charged_and_is_not_on_record_has_no_second_release(
    tmp_path: Path,
) -> None:
    first = build(ledger=tmp_path / "ledger.json")
    states: list[Any] = []
    first._observers.append(lambda _: states.append(first.state()))
    released(first, rounds=3)
    second = build(ledger=tmp_path / "ledger.json")
    result = second.start(grid(), state_of(START), num_rounds=6, from_state=states[0], timeout=20)
    # Round 2 was charged by the first process, whose noise nobody has any more.
    assert second.ledger.rounds == 3
    assert list(result.train_metrics_clientapp) == [2]


def test_a_round_whose_charge_failed_is_charged_before_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, and a loop of one's own that tries the round again when there is room."""
    strategy = build(ledger=tmp_path / "ledger.json", noises=tmp_path / "noises", start_timeout=1)
    replies = partial(one_by_one, strategy, grid())
    replies(1)
    with monkeypatch.context() as full:
        full.setattr(LockedFile, "replace", no_space)
        with pytest.raises(OSError, match="No space"):
            replies(2)
    assert rounds_in(tmp_path / "ledger.json") == strategy.ledger.rounds == 1
    replies(2)
    assert rounds_in(tmp_path / "ledger.json") == strategy.ledger.rounds == 2


def no_space(file: LockedFile, data: bytes) -> None:
    del file, data
    raise OSError(errno.ENOSPC, "No space left on device")


def one_by_one(strategy: PrivateAveraging, over: MemoryGrid, server_round: int) -> None:
    """A round of a loop by hand."""
    arrays = state_of(START) if strategy._model is None else strategy._model.arrays()
    messages = list(strategy.configure_train(server_round, arrays, ConfigRecord(), over))
    strategy.aggregate_train(server_round, over.send_and_receive(messages, timeout=20))


def test_a_run_goes_on_with_the_noises_of_the_rounds_before(tmp_path: Path) -> None:
    """Between two rounds nothing is lost, and the budget is that of the whole run."""
    options = {"max_epsilon": plan().figure().epsilon * (1 + 1e-9)}
    first = DPFedAvg(
        plan(**options), ledger=tmp_path / "ledger.json", local_rate=LR, statistics="server"
    )
    head = released(first, rounds=3)
    second = DPFedAvg(
        plan(**options), ledger=tmp_path / "ledger.json", local_rate=LR, statistics="server"
    )
    tail = released(second, from_state=first.state())
    fresh = dense(B, 6) @ np.concatenate([head, tail])
    np.testing.assert_allclose(fresh.std(axis=1), Z * C, rtol=WITHIN)
    assert second.figure() == first.privacy.figure()


def counted(asked: list[int], first_id: int = 10) -> MemoryGrid:
    """Clients 0..m - 1 by ids from `first_id`; who is asked is noted by its number."""

    def noted(client: int, answer: Answer) -> Answer:
        def note(message: Any) -> Any:
            asked.append(client)
            return answer(message)

        return note

    return MemoryGrid({first_id + i: noted(i, replies(nothing, False, i)) for i in range(CLIENTS)})


def test_who_comes_back_under_another_id_has_no_second_turn(tmp_path: Path) -> None:
    """A node's id is new where its machine or the server's link was; its turn would be, too."""
    asked: list[int] = []
    state = None
    # Ids that nobody had before, by which it is the turn of clients 1 and 5 in every round.
    for done, first_id in enumerate((100, 1001, 2002)):
        strategy = build(ledger=tmp_path / "ledger.json", start_timeout=1)
        strategy.start(
            counted(asked, first_id),
            state_of(START),
            num_rounds=done + 1,
            timeout=20,
            from_state=state,
        )
        state = strategy.state()
    assert strategy.ledger.rounds == 3
    assert asked == [1, 5]


def run_of(strategy: PrivateAveraging, rounds: int, asked: list[int], **options: Any) -> None:
    strategy.start(counted(asked), state_of(START), num_rounds=rounds, timeout=20, **options)


def test_the_noise_of_another_run_is_not_handed_out(tmp_path: Path) -> None:
    places: dict[str, Any] = {"ledger": tmp_path / "ledger.json", "noises": tmp_path / "noises"}
    run_of(build(**places), 2, [])
    asked: list[int] = []
    second = build(**places)
    with pytest.raises(ValueError, match=r"noises = .* is another run's: name a folder") as caught:
        run_of(second, 4, asked)
    assert "\n" not in str(caught.value)
    assert (asked, second.ledger.rounds) == ([], 2)
    # Nor in a loop that begins without `start`.
    context = RoundContext(1, LR, torch.zeros(D), cohort=CohortPlan.of([]))
    with pytest.raises(RunOver, match="is another run's"):
        second.combine(torch.zeros(0, D), torch.ones(0, dtype=torch.float64), context)


def test_a_strategy_whose_clients_take_turns_begins_once(tmp_path: Path) -> None:
    strategy = build(ledger=tmp_path / "ledger.json", noises=tmp_path / "noises")
    asked: list[int] = []
    run_of(strategy, 1, [])
    with pytest.raises(ValueError, match="a second start without from_state is not allowed"):
        run_of(strategy, 1, asked)
    run_of(strategy, 2, asked, from_state=strategy.state())
    assert (len(asked), strategy.ledger.rounds) == (2, 2)


def test_nobody_is_asked_for_a_round_whose_release_is_on_record(tmp_path: Path) -> None:
    """What they sent would be thrown away, and the link that it came by noted by no charge."""
    places: dict[str, Any] = {"ledger": tmp_path / "ledger.json", "noises": tmp_path / "noises"}
    states: list[Any] = []
    asked: list[int] = []
    first = build(**places)
    first._observers.append(lambda _: states.append(first.state()))
    run_of(first, 3, [])
    second = build(**places)
    # Rounds 2 and 3 are done again.
    run_of(second, 4, asked, from_state=states[1])
    assert second.ledger.rounds == 4
    group = plan().draw(range(10, 10 + CLIENTS), None, 4).clients  # type: ignore[arg-type]
    assert asked == [client - 10 for client in group]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"participation": RotatingParticipation(2), "bands": 2}, "groups = 2 is not allowed"),
        ({"bands": 2}, "bands = 2 is not allowed: the run whose state it is had 4"),
        ({"participation": RotatingParticipation(B, seed=1)}, "seed = 1 is not allowed"),
        ({"num_clients": CLIENTS + 1}, "num_clients = 9 is not allowed"),
        ({"identity": "query"}, "identity = query or key is not allowed"),
    ],
)
def test_a_run_goes_on_with_the_turns_that_it_began_with(
    options: dict[str, Any], words: str
) -> None:
    values = build().own_values()
    identity = {"identity": options["identity"]} if "identity" in options else {}
    changed = plan(**{name: one for name, one in options.items() if name != "identity"})
    other = DPFedAvg(changed, local_rate=LR, statistics="server", **identity)
    with pytest.raises(ValueError, match=words) as caught:
        other.restore_own({**values, "ledger": other.ledger.mark()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"noise_location": "client"}, "noise_location = client is not allowed"),
        ({"bands": B + 1}, "bands = 5 is not allowed with 4 group"),
        ({"participation": RotatingParticipation(9)}, "groups = 9 is not allowed"),
        ({"bands": 0}, "bands = 0 is not allowed"),
    ],
)
def test_what_has_no_analysis_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        plan(**options)
    assert "\n" not in str(caught.value)


def test_one_group_takes_no_turns() -> None:
    with pytest.raises(ValueError, match="groups = 1 is not allowed"):
        RotatingParticipation(1)

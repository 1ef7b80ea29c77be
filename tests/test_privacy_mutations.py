"""Changes that would break a claim in silence, each killed by a test that was there for it."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import test_adaptive_threshold
import test_claim_and_link
import test_disclosure
import test_dp_sgd
import test_generators
import test_models_that_draw
import test_noise_record
import test_own_models_under_a_claim
import test_resumed_spending
import test_resumed_turns
import test_turns
from mutants import Killer, killed_by, mutated

from blackthorn.client_app import clientapp, disclosure, dp_sgd, node_data, private_update
from blackthorn.strategies import (
    accounting,
    adaptive_threshold,
    enrolment_messages,
    noise,
    noise_record,
    participation,
    private_averaging,
    turns,
)
from blackthorn.strategies.participation import FullParticipation

_charge = killed_by(test_dp_sgd.test_the_charge_is_the_other_librarys)
_step = killed_by(
    test_dp_sgd.test_a_step_without_noise_is_the_sum_of_clipped_gradients_over_b, "logistic", 7
)
_noise = killed_by(test_dp_sgd.test_the_noise_is_gaussian_and_of_the_size_that_is_charged, "mlp-64")
_whatever_a_client_has = killed_by(
    test_dp_sgd.test_noise_and_figure_are_the_same_whatever_a_client_has
)
_batches = killed_by(test_dp_sgd.test_an_example_is_in_a_batch_with_the_rate_and_on_its_own)
_empty_batches = killed_by(test_dp_sgd.test_empty_batches_are_noised_all_the_same, "logistic")
_not_finite = killed_by(
    test_dp_sgd.test_an_example_without_a_finite_gradient_does_not_show, math.nan
)


def _drawing(kind: str) -> Killer:
    check = test_models_that_draw.test_an_example_more_moves_the_sum_by_its_own_gradient_alone
    return killed_by(check, kind)


_every_number = killed_by(test_dp_sgd.test_every_number_is_the_operating_systems)
_never_from_a_seed = killed_by(
    test_generators.test_a_claim_never_draws_from_a_seed,
    {**test_generators.CENTRAL, **test_generators.DP_SGD, "noise-location": "client"},
)


def _said(claim: str) -> Killer:
    check = test_disclosure.test_under_a_claim_one_example_more_shows_in_nothing_that_is_said
    return killed_by(check, claim)


_raised = killed_by(test_disclosure.test_what_cannot_be_trained_on_is_not_told, "sample")
_held_out = killed_by(test_disclosure.test_nothing_is_held_out_for_what_may_not_be_said, "sample")
_done_again = killed_by(test_resumed_spending.test_a_round_that_is_done_again_is_charged_again)
_bands = killed_by(test_noise_record.test_the_noise_is_that_of_the_dense_matrix, 5)
_count_is_charged = killed_by(
    test_adaptive_threshold.test_updates_and_count_together_cost_what_is_charged, 0.5, 8
)
_too_soon = killed_by(test_turns.test_nobody_joins_again_too_soon)
_turns = killed_by(test_noise_record.test_turns_are_such_a_pattern, 8, 3)
_another_runs = killed_by(test_turns.test_the_noise_of_another_run_is_not_handed_out)
_second_turn = killed_by(test_turns.test_who_comes_back_under_another_id_has_no_second_turn)
_cost_of_turns = killed_by(
    test_noise_record.test_the_charge_is_another_librarys_for_so_many_rounds_of_a_client,
    *(6, 2, "zero-out"),
)
_second_release = killed_by(
    test_turns.test_a_round_that_was_charged_and_is_not_on_record_has_no_second_release
)
_same_release = killed_by(
    test_resumed_turns.test_a_round_that_is_done_again_is_the_same_release, True, 1
)


def _one_more_client(kind: str) -> Killer:
    check = test_own_models_under_a_claim.test_a_client_more_in_front_moves_no_other_clients_update
    return killed_by(check, kind)


def _unguarded(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    with test_claim_and_link.superlink_in(folder, guarded=False) as link:
        test_claim_and_link.test_clients_of_a_superlink_without_the_guard_are_not_covered(
            link, folder
        )


def _read_on_the_way(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    with test_claim_and_link.superlink_in(folder, guarded=True, is_private=False) as link:
        test_claim_and_link.test_over_a_link_without_tls_nobody_on_the_way_is_covered(link, folder)


def _asked_and_died(folder: Path, patch: pytest.MonkeyPatch) -> None:
    check = test_claim_and_link
    check.test_who_was_asked_over_an_open_link_is_not_covered_where_the_round_died_before_its_charge(
        folder, FullParticipation(), patch
    )


@pytest.mark.parametrize(
    ("module", "changes", "killer"),
    [
        # DP-SGD's steps.
        (dp_sgd, [("summed / spec.batch_size", "summed / max(1, len(drawn))")], _step),
        (
            dp_sgd,
            [
                (
                    "summed / spec.batch_size",
                    "summed / max(1, int(len(examples) * spec.sample_rate))",
                )
            ],
            _whatever_a_client_has,
        ),
        (dp_sgd, [("clip(gradient.double(), spec.clip_norm)", "gradient.double()")], _step),
        (dp_sgd, [(".nan_to_num_(nan=0.0)", "")], _not_finite),
        (dp_sgd, [("            seed_global_generators(seed)\n", "")], _drawing("dropout")),
        (dp_sgd, [("model.forgetting()", "model")], _drawing("a buffer")),
        (dp_sgd, [("deviation = spec.noise", "deviation = 0.9 * spec.noise")], _noise),
        (
            dp_sgd,
            [("(len(w),), deviation", "(len(w),), deviation * bool(len(drawn))")],
            _empty_batches,
        ),
        # Its batches.
        (
            dp_sgd,
            [("< spec.sample_rate", "< 1 / -(-len(examples) // spec.batch_size)")],
            _batches,
        ),
        (dp_sgd, [("randomness.uniform(len(examples))", "randomness.uniform(1)")], _batches),
        (
            dp_sgd,
            [
                (
                    "np.flatnonzero(randomness.uniform(len(examples)) < spec.sample_rate)",
                    "np.argsort(randomness.uniform(len(examples)))[:round(0.3 * len(examples))]",
                )
            ],
            _batches,
        ),
        # A threshold that moves.
        (
            adaptive_threshold,
            [("return (noise_multiplier**-2 - count**-2) ** -0.5", "return noise_multiplier")],
            _count_is_charged,
        ),
        # Clients that take turns.
        (noise_record, [("get(server_round - back)", "get(server_round - back - 1)")], _bands),
        (noise_record, [("[1:], start=1)", "[:-1], start=1)")], _bands),
        (turns, [("< self.plan.groups:", "< self.plan.groups - 1:")], _too_soon),
        (
            participation,
            [("server_round % self.groups", "server_round % (self.groups - 1)")],
            _turns,
        ),
        (
            accounting,
            [('turns = -(-whole("releases", count)', 'turns = (whole("releases", count)')],
            _cost_of_turns,
        ),
        (turns, [("charged != server_round - 1", "charged < server_round - 1")], _second_release),
        (turns, [("if charged < server_round:", "if True:")], _same_release),
        (noise_record, [("if self.run not in (None, run):", "if False:")], _another_runs),
        (turns, [("if self._population is None:", "if True:")], _second_turn),
        # What they cost.
        (dp_sgd, [("rounds * self.steps", "rounds")], _charge),
        (dp_sgd, [("self.noise_multiplier, sample", "2 * self.noise_multiplier, sample")], _charge),
        # Where their numbers come from.
        (dp_sgd, [("if config.insecure_seeded_noise:", "if True:")], _never_from_a_seed),
        (dp_sgd, [("if config.insecure_seeded_noise:", "if True:")], _every_number),
        (private_update, [("if config.insecure_seeded_noise:", "if True:")], _never_from_a_seed),
        (
            private_averaging,
            [("return SystemRandomness()", "return SeededRandomness(stream, 1, server_round)")],
            _never_from_a_seed,
        ),
        (
            noise,
            [
                (
                    "os.urandom(8 * size)",
                    "np.random.default_rng(os.urandom(8)[0]).bytes(8 * size)",
                )
            ],
            _every_number,
        ),
        # What a client says.
        (
            disclosure,
            [('if claim == "none":', 'if claim != "client":')],
            _said("sample"),
        ),
        (
            disclosure,
            [('if claim == "none":', 'if claim != "sample":')],
            _said("client"),
        ),
        (disclosure, [("metrics[figure] = 1", "pass")], _said("both")),
        (disclosure, [("            del metrics[figure]", "            pass")], _said("sample")),
        (
            disclosure,
            [("    return disclosed(config", "    return reply\n    return disclosed(config")],
            _said("clips"),
        ),
        (disclosure, [("        return UNTOLD", "        return problem")], _raised),
        (node_data, [(' or not may_say(config, "evaluation")', "")], _held_out),
        # Whom a client's being there moves, and what is known of who watches.
        (
            clientapp,
            [
                (
                    "        with global_generators_kept(model.device):\n"
                    "            seed_global_generators(own_code_seed(*key), model.device)\n",
                    "        if key:\n",
                )
            ],
            _one_more_client("dropout"),
        ),
        (
            clientapp,
            [("train_clients(model.copy(), own.start", "train_clients(model, own.start")],
            _one_more_client("a buffer"),
        ),
        (enrolment_messages, [('return "open"', 'return "apart"')], _unguarded),
        (enrolment_messages, [('True else "plain"', 'True else "apart"')], _read_on_the_way),
        (private_averaging, [("self.ledger.note_asked(", "(lambda _: None)(")], _asked_and_died),
        # A resume that skips the charges of rounds that are done again.
        (
            private_averaging,
            [
                (
                    "        self.ledger.go_on(values)\n",
                    "        self.ledger.go_on(values)\n"
                    '        held = sum(one["rounds"] for one in values["ledger"]["charges"])\n'
                    "        self._again = self.ledger.rounds - held\n",
                ),
                (
                    "        self.ledger.charge(release)\n",
                    '        self._again = getattr(self, "_again", 0) - 1\n'
                    "        if self._again < 0:\n"
                    "            self.ledger.charge(release)\n",
                ),
            ],
            _done_again,
        ),
    ],
)
def test_a_mutation_is_caught(
    module: ModuleType,
    changes: list[tuple[str, str]],
    killer: Killer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caught = (AssertionError, pytest.fail.Exception)
    with mutated(module, *changes), pytest.raises(caught):
        killer(tmp_path, monkeypatch)

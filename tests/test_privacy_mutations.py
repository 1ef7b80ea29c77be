"""Changes that would break a claim in silence, each killed by a test that was there for it."""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import test_claim_and_link
import test_disclosure
import test_dp_sgd
import test_generators
import test_models_that_draw
import test_own_models_under_a_claim
import test_resumed_spending
from mutants import mutated

from blackthorn.client_app import clientapp, disclosure, dp_sgd, node_data, private_update
from blackthorn.strategies import entropy, private_averaging

Killer = Callable[[Path, pytest.MonkeyPatch], None]


def _charge(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_the_charge_is_the_other_librarys()


def _step(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_a_step_without_noise_is_the_sum_of_clipped_gradients_over_b("logistic", 7)


def _noise(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_the_noise_is_gaussian_and_of_the_size_that_is_charged("mlp-64")


def _whatever_a_client_has(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_noise_and_figure_are_the_same_whatever_a_client_has()


def _batches(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_an_example_is_in_a_batch_with_the_rate_and_on_its_own()


def _empty_batches(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_empty_batches_are_noised_all_the_same("logistic")


def _not_finite(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    test_dp_sgd.test_an_example_without_a_finite_gradient_does_not_show(math.nan)


def _drawing(kind: str) -> Killer:
    def kill(folder: Path, patch: pytest.MonkeyPatch) -> None:
        del folder, patch
        test_models_that_draw.test_an_example_more_moves_the_sum_by_its_own_gradient_alone(kind)

    return kill


def _every_number(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder
    test_dp_sgd.test_every_number_is_the_operating_systems(patch)


def _never_from_a_seed(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del folder, patch
    values = {**test_generators.CENTRAL, **test_generators.DP_SGD, "noise-location": "client"}
    test_generators.test_a_claim_never_draws_from_a_seed(values)


def _said(claim: str) -> Killer:
    check = test_disclosure.test_under_a_claim_one_example_more_shows_in_nothing_that_is_said
    return lambda folder, patch: check(folder, claim)  # noqa: ARG005


def _raised(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    test_disclosure.test_what_cannot_be_trained_on_is_not_told(folder, "sample")


def _held_out(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    test_disclosure.test_nothing_is_held_out_for_what_may_not_be_said(folder, "sample")


def _done_again(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    test_resumed_spending.test_a_round_that_is_done_again_is_charged_again(folder)


def _one_more_client(kind: str) -> Killer:
    check = test_own_models_under_a_claim.test_a_client_more_in_front_moves_no_other_clients_update
    return lambda folder, patch: check(folder, kind)  # noqa: ARG005


def _unguarded(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    with test_claim_and_link.superlink_in(folder, guarded=False) as link:
        test_claim_and_link.test_clients_of_a_superlink_without_the_guard_are_not_covered(
            link, folder
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
            entropy,
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
                    "            seed_global_generators(seed, model.device)\n",
                    "        if seed:\n",
                )
            ],
            _one_more_client("dropout"),
        ),
        (
            clientapp,
            [("train_clients(model.copy(), starts[i]", "train_clients(model, starts[i]")],
            _one_more_client("a buffer"),
        ),
        (private_averaging, [('kept_apart else "open"', 'kept_apart else "apart"')], _unguarded),
        # A resume that skips the charges of rounds that are done again.
        (
            private_averaging,
            [
                (
                    'put its own back") from None\n',
                    'put its own back") from None\n'
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

"""Changes that would leave an algorithm or a figure wrong, each killed by a test that is there."""

from pathlib import Path
from types import ModuleType

import pytest
import test_attacks
import test_audit
import test_clipping_strategies
import test_evaluation
import test_fed_langevin
import test_learning_rate
import test_posterior_diagnostics
import test_posterior_store
import test_rounds
import test_training
import test_what_is_evaluated
import torch
from mutants import Killer, killed_by, mutated

from blackthorn.attacks import vector_attacks
from blackthorn.client_app import clientapp, node_data
from blackthorn.recording import posterior_store
from blackthorn.reporting import posterior_diagnostics
from blackthorn.simulation import auditing
from blackthorn.strategies import (
    aggregators,
    clipping,
    evaluation,
    fed_langevin,
    learning_rate,
    local_rule,
    rounds,
)
from blackthorn.tasks import datasets, labelled, shakespeare

_local_steps = killed_by(
    test_training.test_clients_train_as_with_an_optimizer,
    *("logistic", test_training.SPECS["clipped-with-decay"], torch.float64, 1e-12),
)


def _plateau(gained: float, *, decays: bool) -> Killer:
    check = test_learning_rate.test_on_a_plateau_it_decays_where_the_gain_is_known_and_small
    return killed_by(check, gained, decays)


_gained = killed_by(test_evaluation.test_the_server_evaluates_and_the_rate_follows)


def _tails(successes: int) -> Killer:
    check = test_audit.test_clopper_pearson_inverts_the_binomial_tests
    return killed_by(check, successes, 10)


_halves = killed_by(test_audit.test_the_first_halves_choose_the_event_and_the_second_ones_count_it)
_baruch = killed_by(test_attacks.test_baruch_s_z_is_the_paper_s)
_kept_samples = killed_by(
    test_posterior_store.test_only_thinned_rounds_after_burn_in_that_moved_are_kept
)
_split_rhat = killed_by(test_posterior_diagnostics.test_a_drift_and_chains_apart_are_seen, 41)
_steps_together = killed_by(test_clipping_strategies.test_pi_bounds_the_sum_of_its_steps)
_coordinates = killed_by(
    test_rounds.test_the_coordinates_of_rage_are_drawn_by_the_seed_and_the_round
)


GAINED = "gained < self.threshold"
SUPPORTERS = "num_clients // 2 + 1 - num_corrupt"
HALVES = ("values[: len(values) // 2]", "values[len(values) // 2 :]")
K_LAMBDA = "NormBound(self._local_steps * bound,"


_decaying_steps = killed_by(test_fed_langevin.test_a_run_with_decaying_steps_is_theorem_5_8_s)
_missing_client = killed_by(
    test_fed_langevin.test_a_round_with_a_missing_client_is_skipped_where_that_is_asked_for
)


def _digits(folder: Path, patch: pytest.MonkeyPatch) -> None:
    del patch
    # They are kept in the process once they have been read.
    datasets._load_digits.cache_clear()
    try:
        test_what_is_evaluated.test_digits_are_evaluated_on_every_fifth_of_a_class(folder)
    finally:
        datasets._load_digits.cache_clear()


_idx_files = killed_by(test_what_is_evaluated.test_idx_files_are_evaluated_on_t10k, "mnist")
_shakespeare = killed_by(test_what_is_evaluated.test_shakespeare_is_evaluated_on_the_folder_test)
_own_data = killed_by(
    test_what_is_evaluated.test_a_node_is_evaluated_on_a_fifth_that_it_never_trains_on
)


@pytest.mark.parametrize(
    ("module", "old", "new", "killer"),
    [
        # Weight decay belongs to the gradient that is clipped.
        (
            local_rule,
            "            gradients.add_(params, alpha=self.weight_decay)\n"
            "        changed = self.rule.on_gradient(gradients, params, start)",
            "            decay = self.weight_decay * params\n"
            "        changed = self.rule.on_gradient(gradients, params, start) + decay",
            _local_steps,
        ),
        # A plateau is where little was gained.
        (learning_rate, GAINED, "gained > self.threshold", _plateau(0.0, decays=True)),
        (learning_rate, GAINED, "-gained < self.threshold", _plateau(0.5, decays=False)),
        (learning_rate, GAINED, "abs(gained) < self.threshold", _plateau(-0.2, decays=True)),
        (evaluation, "accuracy - before", "before - accuracy", _gained),
        # An audit's bounds, and the halves of its runs.
        (auditing, "successes, trials - successes + 1", "successes + 1, trials", _tails(3)),
        (auditing, "betainccinv(successes + 1", "betainccinv(successes", _tails(3)),
        (
            auditing,
            "successes, tail) if successes < trials",
            "successes, 2 * tail) if successes < trials",
            _tails(3),
        ),
        (auditing, "if successes else 0.0", "if successes > 3 else 0.0", _tails(3)),
        (auditing, "tail = (1 - confidence) / 2", "tail = 1 - confidence", _halves),
        (auditing, "tail)[0] - delta", "tail)[0]", _halves),
        (auditing, HALVES[1], HALVES[0], _halves),
        (auditing, HALVES[1], "values", _halves),
        (auditing, HALVES[0], HALVES[1], _halves),
        # The clients that "a little is enough" needs on its side.
        (vector_attacks, SUPPORTERS, "num_clients // 2 - num_corrupt", _baruch),
        (vector_attacks, SUPPORTERS, "num_clients // 2 + 1", _baruch),
        # Which θ are samples, and whether their chain has mixed.
        (posterior_store, "past < 1 or", "past < 0 or", _kept_samples),
        (posterior_store, "server_round - self._burn_in", "server_round", _kept_samples),
        (posterior_diagnostics, "rhat(halves", "rhat(values.repeat(2, axis=0)", _split_rhat),
        (posterior_diagnostics, "draws - draws // 2 :]", "draws // 2 : -1]", _split_rhat),
        # ‖u_i‖ ≤ K λ.
        (clipping, K_LAMBDA, "NormBound(bound,", _steps_together),
        (clipping, K_LAMBDA, "NormBound(self._local_steps**0.5 * bound,", _steps_together),
        # RAGE's coordinates are drawn afresh in each round, by a stream of their own.
        (aggregators, "generator=generator,", "generator=np.random.default_rng(0),", _coordinates),
        (rounds, "Stream.RULE, context.server_round", "Stream.RULE, 1", _coordinates),
        (rounds, "Stream.RULE, context", "Stream.PARTICIPATION, context", _coordinates),
        (rounds, "generator_of(stream, self._seed,", "generator_of(stream, 0,", _coordinates),
        # FA-LD's k is 1 in the first step; a round that lacks a client can be skipped.
        (learning_rate, "self.strong_convexity, 1)", "self.strong_convexity, 0)", _decaying_steps),
        (learning_rate, "convexity * step / 12", "convexity * (step + 1) / 12", _decaying_steps),
        (fed_langevin, 'if self._missing == "rescale"', "if True", _missing_client),
        # What is evaluated on is the test set, and nobody trains on it.
        (labelled, "params, self.test, self", "params, self.train, self", _digits),
        (labelled, "params, self.test, self", "params, self.train, self", _idx_files),
        (labelled, "params, self.test, self", "params, self.train, self", _shakespeare),
        (datasets, "(train), examples.select(test)", "(train), examples.select(train)", _digits),
        (datasets, "(labels == label)[2::5]", "(labels == label)[::5]", _digits),
        (datasets, "in (True, False)", "in (True, True)", _idx_files),
        (shakespeare, '_read_split(root / "test")', '_read_split(root / "train")', _shakespeare),
        (clientapp, "client.held_out, message", "client.shard.examples, message", _own_data),
        (node_data, "ExampleShard(training)", "ExampleShard(examples)", _own_data),
    ],
)
def test_a_mutation_is_caught(
    module: ModuleType,
    old: str,
    new: str,
    killer: Killer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the test's own assertion that fails, and not the mutant's code."""
    with mutated(module, (old, new)), pytest.raises((AssertionError, pytest.fail.Exception)):
        killer(tmp_path, monkeypatch)

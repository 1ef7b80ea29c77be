"""One run, whatever carries the messages: configuration -> strategy -> rounds -> run folder."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from blackthorn.attacks import AttackingGrid, fixed_corrupt, redrawn_corrupt
from blackthorn.attacks.registry import OwnAttackFailed
from blackthorn.flower_port.grids import is_flower_simulation
from blackthorn.flower_port.synchronous import SynchronousGrid
from blackthorn.recording.client_history import read_entries
from blackthorn.recording.failure_reason import RunFailed, reason_of
from blackthorn.recording.folder_place import choose_folder, create_folder
from blackthorn.recording.given_weights import check_given_weights
from blackthorn.recording.posterior_store import PosteriorRecorder
from blackthorn.recording.privacy import (
    believed_figures,
    privacy_entry,
    privacy_plan,
    sample_privacy_entry,
    spent_so_far,
)
from blackthorn.recording.resume import note_resumable, read_resumed, with_its_places
from blackthorn.recording.run_counts import last_report
from blackthorn.recording.run_folder import RunFolder
from blackthorn.recording.run_ledger import (
    check_ledger,
    ledger_path,
    noise_folder,
    with_place_of_ledger,
)
from blackthorn.recording.suspects import SuspectWatch, keeps_scores
from blackthorn.recording.tracking import Tracker, check_tracking, make_trackers
from blackthorn.reporting.posterior_report import check_posterior, report_posterior
from blackthorn.reporting.run_report import publish
from blackthorn.server_app.build import build_strategy, check_halves, check_names, server_rule
from blackthorn.server_app.claim_checks import (
    check_evaluation,
    check_figures,
    check_noise,
    check_statistics,
)
from blackthorn.server_app.evaluation import evaluation_of, server_evaluation
from blackthorn.server_app.instruments import Instruments
from blackthorn.server_app.prepared_run import PreparedRun
from blackthorn.server_app.trusted_data import trusted_examples
from blackthorn.settings.catalogue import TRUSTED
from blackthorn.settings.config import ConfigError, RunConfig
from blackthorn.settings.derived import expected_cohort
from blackthorn.settings.own_code import OwnCodeFailed, is_own_code, place_of
from blackthorn.settings.privacy_checks import is_noised
from blackthorn.settings.robustness_checks import rule_of
from blackthorn.strategies.algorithms import algorithm_class, algorithm_facts
from blackthorn.strategies.judging import MetricMissing
from blackthorn.strategies.options import Observer
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem
from blackthorn.wire import SEED

logger = logging.getLogger("blackthorn")


def prepare(config: RunConfig) -> PreparedRun:
    """Check the whole configuration and load the data; contacts nobody and writes nothing.

    Raises ConfigError with one line.
    """
    if config.chains > 1:
        raise ConfigError(
            f"chains = {config.chains} is not allowed here: blackthorn simulate runs several; "
            "elsewhere each is a run with chain = 1, 2, ..., and blackthorn diagnose compares them"
        )
    config = with_place_of_ledger(config)
    check_names(config)
    check_tracking(config)
    folder = choose_folder(config)
    saved = read_resumed(config) if config.resume else None
    if saved is not None:
        config = with_its_places(config, saved)
    facts = algorithm_facts(config)
    try:
        problem = load_problem(config)
        check_evaluation(config, problem.task)
        if not problem.task.on_nodes:
            # Whether the data can be dealt as configured, and their labels be flipped.
            shards = problem.shards()
            problem.poisoned(shards[0], config.attack)
            counts = {i: shard.num_examples for i, shard in enumerate(shards)}
            algorithm_class(config).check_examples(config, counts)
        if rule_of(config) in TRUSTED:
            trusted_examples(config)
        if facts.samples_posterior:
            check_posterior(config, problem)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    plan = privacy_plan(config) if is_noised(config) else None
    check_figures(config, plan)
    if plan is not None:
        check_noise(config, plan, problem)
        check_statistics(config, problem)
    if is_own_code(config.algorithm):
        check_halves(config, plan, problem, ledger_path(config, folder))
    standing = check_ledger(config, plan, folder, saved) if plan is not None else None
    given = check_given_weights(
        config, plan, problem.model.module, folder, resumed=saved is not None
    )
    return PreparedRun(config, problem, folder, plan, saved, standing, given)


def execute(
    prepared: PreparedRun,
    grid: Grid,
    observers: Sequence[Observer] = (),
    trackers: Sequence[Tracker] = (),
) -> dict[str, Any]:
    """Run to the end and return summary.json's content; a failure is written there and raised.

    `trackers`: more of them than the configuration names.

    Raises RunFailed if no round changed the model, NotEnoughClients if too few connect in time,
    NotEnoughReplies after fail-after rounds in a row with too few replies. What cannot be written
    is a RunFailed too.
    """
    config = prepared.config
    create_folder(prepared.folder, config)
    num_classes = prepared.problem.task.num_classes
    instruments = Instruments(config.instruments, num_classes, config.seed)
    trackers = [*make_trackers(config, prepared.folder), *trackers]
    with _unwritable_told():
        folder = RunFolder(
            prepared.folder,
            config,
            instruments,
            trackers,
            prepared.saved,
            prepared.own_values,
            prepared.told,
        )
    folder.outlook = prepared.outlook
    try:
        with _unwritable_told(), _own_code_told():
            _federate(prepared, grid, folder, observers)
    except BaseException as error:
        # On a full disk this cannot be written either.
        with contextlib.suppress(OSError):
            folder.finish("failed", reason_of(error, config))
            if config.report and not isinstance(error.__cause__, OSError):
                publish(prepared.folder)
        note_resumable(error, prepared.folder)
        raise
    with _unwritable_told():
        summary = folder.finish("completed")
        if config.report:
            publish(prepared.folder)
    return summary


@contextlib.contextmanager
def _unwritable_told() -> Iterator[None]:
    """RunFailed, one line, in place of an OSError: a full disk, for example."""
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise RunFailed(f"{error.strerror or error}{where}") from error


@contextlib.contextmanager
def _own_code_told() -> Iterator[None]:
    """RunFailed, one line, in place of what the user's own code raises; ConfigError where the
    metrics are not those by which models are to be judged."""
    try:
        yield
    except OwnAttackFailed as error:
        raise RunFailed(f"attack: {error}") from error
    except OwnCodeFailed as error:
        raise RunFailed(str(error)) from error
    except MetricMissing as error:
        raise ConfigError(str(error)) from error


def _federate(
    prepared: PreparedRun, grid: Grid, folder: RunFolder, observers: Sequence[Observer]
) -> None:
    config = prepared.config
    writers: list[Observer] = [_Checkpoints(prepared, folder)]
    if algorithm_facts(config).samples_posterior:
        writers.append(PosteriorRecorder(config, prepared.problem, prepared.folder))
    # Before round 1 there is nothing to go on from: such a run begins again, in its folder.
    saved = prepared.saved if prepared.saved and prepared.saved.state.server_round else None
    if saved is not None:
        # The state comes before these files, and the server may have died in between.
        for writer in writers:
            writer(last_report(saved))

    watch = None
    if keeps_scores(config):
        entries = read_entries(prepared.folder) if saved is not None else []
        watch = SuspectWatch(entries, config.quarantine_after)
        folder.suspects = watch.entry
    scoring: list[Observer] = [] if watch is None else [watch]
    # The last one: a round that ends the run is written down before.
    in_turn: list[Observer] = [*scoring, folder, *writers, *observers, end_where_all_fail]

    def tell(report: RoundReport) -> None:
        """What the first add to their copy of it, the next are told."""
        claimed = report.sample_epsilons
        report.sample_epsilons = believed_figures(config, claimed, strategy.rounds_begun)
        for observer in in_turn:
            observer(report)

    strategy = build_strategy(
        config,
        [tell],
        prepared.plan,
        ledger_path(config, prepared.folder),
        noise_folder(config, prepared.folder),
        watch,
    )
    if prepared.saved is not None:
        strategy.rounds_begun = prepared.saved.state.begun
    if prepared.standing is not None:
        # Also where no round had ended when the run died: it is no earlier run of its own.
        strategy.restore_own(prepared.own_values)
    folder.set_privacy(
        lambda: privacy_entry(config, strategy, prepared.given),
        lambda: sample_privacy_entry(config, strategy.rounds_begun, prepared.given),
    )
    folder.set_spent(lambda: {**spent_so_far(strategy), **prepared.given})
    folder.keep_states(strategy.state, lambda: strategy.between_rounds)
    result = strategy.start(
        with_simulated_attack(config, grid),
        prepared.problem.model.module,
        num_rounds=config.num_server_rounds,
        timeout=config.round_timeout,
        train_config=ConfigRecord({SEED: config.seed}),
        evaluate_fn=evaluation_of(config, prepared.problem, prepared.has_held_out),
        from_state=None if saved is None else saved.state,
    )
    if folder.rounds_skipped == config.num_server_rounds:
        raise RunFailed(f"no round changed the model; the last one: {folder.last_skip}")
    if config.output_iterate == "best" and not strategy.is_judged:
        told = "output-iterate = best: no evaluation has a figure to judge by; this is the last one"
        folder.outlook = [*folder.outlook, told]
    folder.set_output(strategy.output_round, _final_metrics(prepared, result.arrays))
    folder.save_model({k: a.numpy() for k, a in result.arrays.items()}, "final")
    if algorithm_facts(config).samples_posterior:
        folder.posterior = report_posterior(prepared.folder, config, prepared.problem)
        if not folder.posterior["samples"]:
            raise RunFailed(
                f"no posterior sample: {folder.rounds_skipped} of {config.num_server_rounds} "
                f"rounds left the model as it was; the last one: {folder.last_skip}"
            )


def end_where_all_fail(report: RoundReport) -> None:
    """Raises OwnCodeFailed where all the invited fail in the same place of the user's own code,
    and would in the next round."""
    reasons = [one.reason for one in report.rejected]
    places = {place_of(reason) for reason in reasons}
    if len(reasons) == len(report.invited) and len(places) == 1 and None not in places:
        whose = f"all {len(reasons)} clients" if len(reasons) > 1 else "the round's client"
        raise OwnCodeFailed(f"round {report.server_round}, {whose}: {reasons[0]}")


def _final_metrics(prepared: PreparedRun, arrays: ArrayRecord) -> dict[str, float]:
    """Metrics of the model that the run hands out (empty where the server cannot evaluate)."""
    evaluation = server_evaluation(prepared.problem)
    metrics = evaluation(0, arrays) if evaluation is not None else None
    return {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, int | float)}


def with_simulated_attack(config: RunConfig, grid: Grid) -> Grid:
    """In a simulation, the grid whose corrupt clients attack; a real deployment's stays as it is.

    There the Byzantine nodes are programs of their own, and the server knows nothing of them.
    """
    simulated = isinstance(grid, SynchronousGrid) or is_flower_simulation(grid)
    if not simulated or not config.num_byzantine:
        return grid
    if config.attack == "label-flip" and is_flower_simulation(grid):
        raise ConfigError(
            "attack = label-flip is not allowed in Flower's simulation, whose clients cannot be "
            "told to lie: use blackthorn simulate or blackthorn cluster"
        )
    if config.byzantine_set == "fixed":
        corrupt = fixed_corrupt(config.num_clients, config.num_byzantine)
    else:
        corrupt = redrawn_corrupt(config.num_clients, config.num_byzantine, config.seed)
    return AttackingGrid(
        grid,
        config.attack,
        corrupt,
        config.seed,
        config.collusion,
        config.omniscient,
        expected_cohort=expected_cohort(config),
        rule_at=server_rule(config),
    )


class _Checkpoints:
    """Observer that keeps the model, and writes it every so many rounds."""

    def __init__(self, prepared: PreparedRun, folder: RunFolder) -> None:
        self._every = prepared.config.checkpoint_every
        self._model = prepared.problem.model
        self._state = {k: v.numpy() for k, v in prepared.problem.state().items()}
        self._folder = folder

    def __call__(self, report: RoundReport) -> None:
        views = self._model.unflatten(report.model)
        self._state.update({name: view.numpy() for name, view in views.items()})
        self._state.update(report.statistics)
        if self._every and report.server_round and report.server_round % self._every == 0:
            self.save(f"round-{report.server_round:05d}")

    def save(self, name: str) -> None:
        self._folder.save_model(self._state, name)

"""Observer that turns the chain of global models into stored posterior samples."""

from pathlib import Path

from blackthorn.recording.posterior_store import FOLDER, PosteriorStore
from blackthorn.settings.config import RunConfig
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import Problem


class PosteriorRecorder:
    """After `burn-in` rounds, offers every `thinning`-th θ to the store in the run folder.

    A round that left the model as it was adds no sample.
    """

    def __init__(self, config: RunConfig, problem: Problem, run: Path) -> None:
        self._burn_in, self._thinning = config.burn_in, config.thinning
        self._model = problem.model
        self._state = {name: value.numpy() for name, value in problem.state().items()}
        self.store = PosteriorStore(
            run / FOLDER, config.max_samples, config.keep_samples, config.seed
        )

    def __call__(self, report: RoundReport) -> None:
        """See a round."""
        past = report.server_round - self._burn_in
        if past < 1 or past % self._thinning or report.skipped:
            return
        views = self._model.unflatten(report.model)
        state = {**self._state, **{name: view.numpy() for name, view in views.items()}}
        # Fewer replies than clients invited: this θ's noise was larger than it should be.
        self.store.offer(
            report.server_round,
            state,
            invited=str(len(report.invited)),
            replied=str(len(report.accepted)),
        )

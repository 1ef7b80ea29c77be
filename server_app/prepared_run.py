"""A run that is ready to begin, and what people are told of it before it does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from blackthorn.recording.folder_place import OPERATOR
from blackthorn.recording.given_weights import what_is_given, what_own_code_loads
from blackthorn.recording.resume import how_it_goes_on, moved_folder
from blackthorn.recording.run_ledger import Standing, new_ledger, shortened
from blackthorn.recording.state_files import Saved
from blackthorn.server_app.claim_checks import check_evaluation, shared_examples
from blackthorn.server_app.evaluation import unevaluated
from blackthorn.server_app.useless_noise import useless_noise
from blackthorn.settings.cohort_risk import unknown_risk
from blackthorn.settings.config import RunConfig
from blackthorn.settings.key_facts import unused_settings
from blackthorn.settings.privacy_checks import claims_privacy, has_local_claim
from blackthorn.strategies import PrivacyPlan
from blackthorn.tasks.problem import Problem

_WITHHELD = f"who does not count in a round, and why, is told in the run folder's {OPERATOR} alone"


@dataclass(frozen=True)
class PreparedRun:
    """A run in which everything that can be checked beforehand has been."""

    config: RunConfig
    problem: Problem
    folder: Path
    plan: PrivacyPlan | None = None
    # Where the run stands that is resumed; None: a new one.
    saved: Saved | None = None
    # How its ledger stands; None where it charges none.
    standing: Standing | None = None
    # Digests of the weights that a claim takes to be public; none where it starts from the seed.
    given: Mapping[str, str] = field(default_factory=dict)
    # False: it is known that nobody has examples to evaluate on.
    has_held_out: bool = True

    @property
    def notes(self) -> list[str]:
        """What people are to know before it starts, a line each."""
        resumed = [] if self.saved is None else [how_it_goes_on(self.saved)]
        if self.standing is not None and self.standing.spent is not None:
            resumed.append(self.standing.spent)
        if self.saved is not None and self.config.client_momentum:
            resumed.append("the clients' momenta begin anew: they are not the server's to keep")
        warned = [f"warning: {line}" for line in self.warnings]
        withheld = [_WITHHELD] if claims_privacy(self.config) else []
        return [*unused_settings(self.config), *resumed, *warned, *withheld]

    @property
    def warnings(self) -> list[str]:
        """Those of the notes that the run's summary and report repeat."""
        return [*self.told, *self.outlook]

    @cached_property
    def told(self) -> list[str]:
        """What the run remembers of them, should it go on: a later start may not find it."""
        told = [
            new_ledger(self.config, self.folder),
            moved_folder(self.saved, self.folder) if has_local_claim(self.config) else None,
            self.standing and self.standing.moved,
            check_evaluation(self.config, self.problem.task),
            what_is_given(self.given),
            what_own_code_loads(self.config),
            shared_examples(self.config, self.problem),
            unevaluated(self.config, self.problem, self.has_held_out),
            unknown_risk(self.config),
        ]
        return [line for line in told if line]

    @cached_property
    def outlook(self) -> list[str]:
        """What this start foresees of the run's end; a later one may foresee another."""
        foreseen = [
            shortened(self.config, self.saved, self.standing),
            self.standing and self.standing.replaced_accountant,
            *useless_noise(self.config, self.plan, self.problem.model.dimension),
        ]
        return [line for line in foreseen if line]

    @property
    def own_values(self) -> dict[str, Any]:
        """What the strategy is to remember already before its first round."""
        return {} if self.standing is None else self.standing.own()

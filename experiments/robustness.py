"""Which rule keeps what, under which attack, on which data: not a paper's table, but ours."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from blackthorn.experiments.engine_run import EngineRun, run_alone
from blackthorn.experiments.estimate import Estimate
from blackthorn.experiments.finding import Claim, ahead, between
from blackthorn.experiments.study import (
    Cell,
    Context,
    Experiment,
    Numbers,
    Paper,
    Scale,
    Section,
    Table,
    Value,
    series,
    spread,
)
from blackthorn.settings.config import make_config
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem

SIZE = 20
SETTING: dict[str, str | int | float | bool] = {
    "algorithm": "gfedavg",
    "task": "digits",
    "model": "mlp-32",
    "num-clients": SIZE,
    "local-steps": 10,
    "batch-size": 16,
    "local-lr": 0.3,
    # The same examples are evaluated on, whether a rule looks at these or not.
    "trusted-examples": 100,
    "evaluate-every": 1000,
}
ROUNDS, QUICK_ROUNDS = 100, 15
ALIKE, UNLIKE = "alike", "dominant label"
DATA: dict[str, dict[str, str | float]] = {
    ALIKE: {"partition": "iid"},
    "Dirichlet 1": {"partition": "dirichlet", "dirichlet-alpha": 1.0},
    "Dirichlet 0.3": {"partition": "dirichlet", "dirichlet-alpha": 0.3},
    UNLIKE: {"partition": "dominant-label"},
}
GEOMETRIC = "geometric-median"
EQUAL_CAF, TRUST = "caf, equal lengths", "fltrust, 100 examples"
RULES: dict[str, dict[str, str | float]] = {
    "mean": {"aggregator": "mean"},
    "rage": {"aggregator": "rage"},
    "rage, mixing": {"aggregator": "rage", "pre-aggregator": "nearest-neighbour-mixing"},
    "rage, momentum": {"aggregator": "rage", "client-momentum": 0.9},
    "median": {"aggregator": "median"},
    "trimmed-mean": {"aggregator": "trimmed-mean"},
    "multi-krum": {"aggregator": "multi-krum"},
    GEOMETRIC: {"aggregator": "geometric-median"},
    "centered-clipping": {"aggregator": "centered-clipping"},
    "caf": {"aggregator": "caf"},
    EQUAL_CAF: {"aggregator": "caf", "pre-aggregator": "equal-lengths"},
    "validated, 100 examples": {"aggregator": "validated"},
    TRUST: {"aggregator": "fltrust"},
}
# No more than the claims are of.
QUICK_RULES = {ALIKE: ("mean", GEOMETRIC), UNLIKE: ("mean", "rage", EQUAL_CAF, TRUST)}
NONE, ADAPTIVE = "none", "adaptive"
ATTACKS = (
    *("random-gradient", "reverse-average", "gradient-shift", "all-ones", "baruch"),
    *("reverse-scaled-average", "sign-flip", "min-max", ADAPTIVE),
)
QUICK_ATTACKS = (ADAPTIVE,)
WITHOUT_TRUST = "caf, equal lengths, momentum"
NEARLY_HALF = 9
# Of 20 clients: 20 % lie under every attack, 10 and 30 % under the adaptive one, too.
LIARS, MORE_LIARS = 4, (2, 6)


def cells(scale: Scale) -> Sequence[Cell]:
    """Every rule on all data, without an attack and under each; a run a seed."""
    by_data = scale.choose(dict.fromkeys(DATA, tuple(RULES)), QUICK_RULES)
    cases = [(NONE, 0), *((attack, LIARS) for attack in scale.choose(ATTACKS, QUICK_ATTACKS))]
    cases += scale.choose([(ADAPTIVE, liars) for liars in MORE_LIARS], [])
    rounds = scale.choose(ROUNDS, QUICK_ROUNDS)
    found = []
    for kind, rules in by_data.items():
        for attack, liars in cases:
            for rule in rules:
                lies = {"attack": attack, "num-byzantine": liars, "omniscient": liars > 0}
                lies |= {} if rule == "mean" else {"num-corrupt": liars or LIARS}
                keys = {**SETTING, **DATA[kind], **RULES[rule], **lies, "num-server-rounds": rounds}
                cost = rounds * (0.4 if attack == ADAPTIVE else 0.04)
                for seed in range(scale.num_seeds(3, 1)):
                    label = (kind, attack, liars, rule, seed)
                    found.append(Cell(label, kept, {**keys, "seed": seed}, cost=cost))
    return found


def kept(settings: Mapping[str, Any], context: Context) -> Value:
    """Test "accuracy" in % after the last round."""
    config = make_config({**settings, "data-dir": context.data_dir})
    accuracies: list[float] = []

    def watch(report: RoundReport) -> None:
        if "accuracy" in report.metrics:
            accuracies.append(round(100 * report.metrics["accuracy"], 3))

    run_alone(EngineRun(config, load_problem(config), [watch]))
    return {"accuracy": accuracies[-1]}


def section(numbers: Numbers, scale: Scale) -> Section:
    """A table a kind of data, and what the rules are recommended for."""
    kinds = list(dict.fromkeys(label[0] for label in numbers))
    return Section(
        claims=_claims(numbers),
        tables=[_table(numbers, str(kind), scale) for kind in kinds],
        texts=[
            "The attackers are the last of 20 clients, know the rule and see all honest updates. "
            "Every rule but the mean is told how many there are, and without an attack that there "
            f"are {LIARS}."
        ],
        setting={**SETTING, "num-server-rounds": scale.choose(ROUNDS, QUICK_ROUNDS)},
    )


def recommended_cells(scale: Scale) -> Sequence[Cell]:
    """The settings of docs/robustness.md for unlike clients, and the mean where nobody lies."""
    rounds = scale.choose(ROUNDS, QUICK_ROUNDS)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("mean", 0, RULES["mean"]),
        (WITHOUT_TRUST, LIARS, {**RULES[EQUAL_CAF], "client-momentum": 0.9, "num-corrupt": 5}),
        *((TRUST, liars, {**RULES[TRUST], "num-corrupt": liars}) for liars in (LIARS, NEARLY_HALF)),
    ]
    found = []
    for rule, liars, own in cases:
        lies = {"attack": ADAPTIVE if liars else NONE, "num-byzantine": liars}
        keys = {**SETTING, **DATA[UNLIKE], **own, **lies, "omniscient": liars > 0}
        keys["num-server-rounds"] = rounds
        for seed in range(scale.num_seeds(3, 1)):
            cost = rounds * (0.4 if liars else 0.04)
            label = (rule, liars, seed)
            found.append(Cell(label, kept_beside_bound, {**keys, "seed": seed}, cost=cost))
    return found


def kept_beside_bound(settings: Mapping[str, Any], context: Context) -> Value:
    """Test "accuracy" in % after the last round, and in every round "unlike", G²/‖h̄‖² of what the
    honest clients sent: their mean squared distance to their mean h̄ over its squared length."""
    config = make_config({**settings, "data-dir": context.data_dir})
    honest = config.num_clients - config.num_byzantine
    accuracies: list[float] = []
    unlike: list[float] = []

    def watch(report: RoundReport) -> None:
        if "accuracy" in report.metrics:
            accuracies.append(round(100 * report.metrics["accuracy"], 3))
        if report.updates is not None:
            rows = [row for row, client in enumerate(report.accepted) if client < honest]
            sent = report.updates[rows].to(torch.float64)
            average = sent.mean(dim=0)
            distance = (sent - average).square().sum(dim=1).mean()
            unlike.append(float(f"{float(distance / average.square().sum()):.4g}"))

    run_alone(EngineRun(config, load_problem(config), [watch]))
    return {"accuracy": accuracies[-1], "unlike": unlike}


def recommended_section(numbers: Numbers, scale: Scale) -> Section:
    """What the settings keep, and what no rule without trusted data is sure of."""
    rounds = scale.choose(ROUNDS, QUICK_ROUNDS)
    mean = [value["accuracy"] for value in series(numbers, "mean", 0)]
    shares: dict[tuple[str, int], list[float]] = {}
    rows = []
    for rule, liars in dict.fromkeys((str(label[0]), int(label[1])) for label in numbers):
        values = series(numbers, rule, liars)
        own = [value["accuracy"] for value in values]
        shares[rule, liars] = list(100 * np.divide(own, mean))
        factor = liars / (SIZE - 2 * liars)
        seen = [value["unlike"] for value in values]
        when = [(one[0], one[len(one) // 2], one[-1]) for one in seen]
        bounds = [f"{factor * mean_of:.2g}" for mean_of in np.mean(when, axis=0)]
        limit = ["", "", ""] if rule == TRUST or not liars else bounds
        rows.append([rule, str(liars), spread(own), spread(shares[rule, liars]), *limit])
    heads = ["setting", "liars of 20", "accuracy in %", "share of the mean's in %"]
    heads += ["limit, first round", "half way", "last"]

    def keeps(text: str, rule: str, liars: int, least: float) -> Claim:
        share = Estimate.of(shares[rule, liars])
        found = [between("share in %", share, least, np.inf)]
        return Claim(text, found, foreseen=None, ours=True)

    return Section(
        claims=[
            keeps(
                "Without trusted data 85 % is kept of what the mean has where nobody lies, while a "
                "fifth of the clients lie.",
                *(WITHOUT_TRUST, LIARS, 85.0),
            ),
            keeps("With 100 trusted examples 93 % is kept.", TRUST, LIARS, 93.0),
            keeps("So it is where 9 of 20 lie.", TRUST, NEARLY_HALF, 93.0),
        ],
        tables=[Table(f"{UNLIKE}, attack {ADAPTIVE}, {rounds} rounds", heads, rows)],
        texts=[
            "The attackers are the last of 20 clients, know the rule and see all honest updates. "
            "The limit is b/(K − 2b) G²/‖h̄‖² of what the honest clients sent in a round, mean of "
            "the seeds: above 1 no rule that sees updates alone is sure to go downhill "
            "(docs/robustness.md)."
        ],
        setting={**SETTING, **DATA[UNLIKE], "num-server-rounds": rounds},
    )


def accuracies(numbers: Numbers, kind: str, attack: str, liars: int, rule: str) -> list[float]:
    """In %, by seed."""
    return [value["accuracy"] for value in series(numbers, kind, attack, liars, rule)]


def _table(numbers: Numbers, kind: str, scale: Scale) -> Table:
    cases = list(dict.fromkeys(label[1:3] for label in numbers if label[0] == kind))
    rules = list(dict.fromkeys(label[3] for label in numbers if label[0] == kind))
    seeds = scale.num_seeds(3, 1)
    heads = ["rule", *(f"{attack}, {liars}" if liars else str(attack) for attack, liars in cases)]
    rows = [
        [
            str(rule),
            *(
                spread(accuracies(numbers, kind, str(attack), int(liars), str(rule)))
                for attack, liars in cases
            ),
        ]
        for rule in rules
    ]
    caption = f"{kind}: test accuracy in %, attack and number of liars, {seeds} seeds"
    return Table(caption, heads, rows)


def _claims(numbers: Numbers) -> list[Claim]:
    def of(rule: str, attack: str, liars: int, kind: str = UNLIKE) -> list[float]:
        return accuracies(numbers, kind, attack, liars, rule)

    mean = of("mean", NONE, 0)
    attacked = {rule: of(rule, ADAPTIVE, LIARS) for rule in (EQUAL_CAF, "rage", TRUST)}
    share = Estimate.of(100 * np.divide(attacked[TRUST], mean))
    return [
        Claim(
            "On unlike data, under an attacker who knows the rule, CAF on updates of equal length "
            "keeps more than RAGE.",
            [ahead("accuracy in %", attacked[EQUAL_CAF], attacked["rage"], "more than RAGE's")],
            foreseen=None,
            ours=True,
        ),
        Claim(
            "There 100 trusted examples keep more than any rule without.",
            [ahead("accuracy in %", attacked[TRUST], attacked[EQUAL_CAF], "more than CAF's")],
            foreseen=None,
            ours=True,
        ),
        Claim(
            "They keep at least 93 % of what the mean has without an attack.",
            [between("share in %", share, 93.0, np.inf)],
            foreseen=None,
            ours=True,
        ),
        Claim(
            "On alike data the geometric median loses less than 5 points under it.",
            [
                ahead(
                    "accuracy in %",
                    of(GEOMETRIC, ADAPTIVE, LIARS, ALIKE),
                    of("mean", NONE, 0, ALIKE),
                    "at most 5 points less than the mean without an attack",
                    room=5.0,
                )
            ],
            foreseen=None,
            ours=True,
        ),
    ]


PAPER = Paper(
    "robustness",
    "Liars among clients, alike and unlike",
    "this project",
    [
        Experiment(
            "table",
            "Rules, attacks and data",
            "Test accuracy of every rule under every attack on digits, where 20 clients' data are "
            "alike, and less and less so.",
            cells,
            section,
        ),
        Experiment(
            "recommended",
            "What to take for unlike clients",
            "Test accuracy of the settings that docs/robustness.md recommends, on digits with "
            "dominant labels, beside what no rule is sure of.",
            recommended_cells,
            recommended_section,
        ),
    ],
)

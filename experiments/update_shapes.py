"""Where clipping costs and how updates spread (Zhang et al., section 2.2: Table 1, Figures 1-3)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from blackthorn.experiments import clipping_runs
from blackthorn.experiments.clipping_runs import CLIPPED, FEDAVG, SHOWN_ROUND
from blackthorn.experiments.estimate import Estimate
from blackthorn.experiments.finding import Claim, Finding, ahead, between, unchecked
from blackthorn.experiments.study import (
    Cell,
    Numbers,
    Plot,
    Scale,
    Section,
    Table,
    series,
    signed,
    spread,
)
from blackthorn.reporting.figures import BLUE, CYCLE, new_figure

# A quarter of the clients of section 4, all of MNIST's images once.
SETTING: dict[str, Any] = {
    "examples-per-client": 125,
    "num-clients": 480,
    "participation": "fixed",
    "clients-per-round": 20,
    "num-server-rounds": 50,
    "local-steps": 32,
    "batch-size": 64,
    "local-lr": 0.1,
    "instruments": False,
}
# A CNN's step takes many times as long, and at the others' rate some of its runs diverge.
CNN = {"num-server-rounds": 30, "local-steps": 16, "batch-size": 16, "local-lr": 0.03}
QUICK = {"num-server-rounds": 16, "local-steps": 16, "batch-size": 32}
DIGITS = {"examples-per-client": 20, "num-clients": 60}
SPLITS = {"IID": "iid", "Non-IID": "two-majority"}
DATA = {"mnist": "EMNIST", "fashion-mnist": "CIFAR-10", "digits": "Shakespeare"}
FIGURES = {"mnist": "figure-1", "fashion-mnist": "figure-2", "digits": "figure-3"}
# Table 1: (IID, clipped, Non-IID, clipped).
_PAPER = {
    ("AlexNet", "EMNIST"): ("98.20", "98.01 (−0.19)", "95.60", "92.00 (−3.60)"),
    ("AlexNet", "CIFAR-10"): ("66.01", "61.18 (−4.83)", "57.14", "49.84 (−7.30)"),
    ("ResNet-18", "EMNIST"): ("99.61", "99.59 (−0.02)", "95.43", "95.33 (−0.10)"),
    ("ResNet-18", "CIFAR-10"): ("76.36", "75.83 (−0.53)", "59.46", "57.91 (−1.55)"),
}


def _models(scale: Scale, data: str) -> tuple[str, ...]:
    if data == "digits":
        return ("mlp-32",)
    return scale.choose(("mlp-200", "cnn"), ("mlp-32",))


def _data_sets(scale: Scale) -> list[str]:
    """Those of Figures 1, 2 and 3; the digits alone where the others are not at hand."""
    return list(dict.fromkeys(scale.data_set(name) for name in DATA))


def cells(scale: Scale) -> list[Cell]:
    """FedAvg and CE-FedAvg by data set, model and split."""
    found = []
    for data in _data_sets(scale):
        for model in _models(scale, data):
            for split, partition in SPLITS.items():
                values = {**SETTING, "task": data, "model": model, "partition": partition}
                values |= CNN if model == "cnn" else {}
                values |= QUICK if scale.quick else {}
                values |= DIGITS if data == "digits" else {}
                cost = {"cnn": 80, "mlp-200": 40}.get(model, 4)
                for seed in range(scale.num_seeds(3, 1)):
                    label = (data, model, split)
                    found += clipping_runs.cells(label, {**values, "seed": seed}, (), cost)
    return found


Case = tuple[str, str]  # data set and model


def section(numbers: Numbers, scale: Scale) -> Section:
    """Table 1 and Figures 1 to 3."""
    cases = list(dict.fromkeys((str(label[0]), str(label[1])) for label in numbers))
    ends = {
        (case, split, method): [v["accuracy"][-1] for v in series(numbers, *case, split, method)]
        for case in cases
        for split in SPLITS
        for method in (FEDAVG, CLIPPED)
    }
    variations = {
        (case, split): [value["variation"] for value in series(numbers, *case, split, FEDAVG)]
        for case in cases
        for split in SPLITS
    }
    drops = {
        (case, split): [
            plain - clipped
            for plain, clipped in zip(
                ends[case, split, FEDAVG], ends[case, split, CLIPPED], strict=True
            )
        ]
        for case in cases
        for split in SPLITS
    }
    found = claims(drops, variations)
    missing = scale.data_set("mnist") == "digits"
    if missing:
        found = unchecked(found, "no MNIST")
    texts = [
        "MNIST stands in for EMNIST, Fashion-MNIST for CIFAR-10, and scikit-learn's digits for "
        "Shakespeare, none of which is at hand; a perceptron and a small CNN with GroupNorm stand "
        "in for AlexNet, ResNet-18 and the stacked LSTM."
    ]
    if missing:
        texts = ["MNIST and Fashion-MNIST are not at hand: digits alone."]
    if scale.quick:
        texts.append("Quick: 16 rounds of 16 steps with batches of 32, one small perceptron.")
    plots = [_shape_plot(numbers, data, [c for c in cases if c[0] == data]) for data in FIGURES]
    setting = {**SETTING, "CNN": CNN, **(QUICK if scale.quick else {})}
    return Section(
        found,
        [_table_1(ends, cases), _paper_table(), _variation_table(variations, drops)],
        [plot for plot in plots if plot is not None],
        texts,
        setting,
    )


BySplit = Mapping[tuple[Case, str], Sequence[float]]  # one a seed


def claims(drops: BySplit, variations: BySplit) -> list[Claim]:
    """Section 2.2's sentences, from the cost of clipping in points and the norms' coefficient of
    variation by (data set and model, split), one a seed.

    What data and models as small as these come to was not known beforehand.
    """
    cases = list(dict.fromkeys(case for case, _ in drops))
    split_costs = [
        _less(f"{model} on {data}: cost on Non-IID and on IID data in points", drops, (data, model))
        for data, model in cases
    ]
    concentrated = [
        _less(f"{model} on {data}: variation on Non-IID and on IID data", variations, (data, model))
        for data, model in cases
    ]
    keys = list(drops)
    seeds = range(min(len(own) for own in drops.values()))
    ranks = [
        float(spearmanr([drops[key][i] for key in keys], [variations[key][i] for key in keys])[0])
        for i in seeds
    ]
    return [
        Claim(
            "Clipping has far less impact on IID than on Non-IID data.", split_costs, foreseen=None
        ),
        Claim(
            "Update norms are more concentrated on IID than on Non-IID data.",
            concentrated,
            foreseen=None,
        ),
        Claim(
            "The cost of clipping goes with the spread of the norms.",
            [between(f"rank correlation over {len(keys)} cases", Estimate.of(ranks), 0.3, 1.0)],
            foreseen=None,
        ),
    ]


def _less(what: str, values: BySplit, case: Case) -> Finding:
    digits = 2 if "cost" in what else 3
    return ahead(what, values[case, "Non-IID"], values[case, "IID"], "less on IID", digits=digits)


def _table_1(ends: Mapping[tuple[Case, str, str], Sequence[float]], cases: Sequence[Case]) -> Table:
    rows = []
    for case in cases:
        row = [case[1], case[0]]
        for split in SPLITS:
            plain, clipped = ends[case, split, FEDAVG], ends[case, split, CLIPPED]
            row += [spread(plain, 2), f"{spread(clipped, 2)} [{signed(clipped, plain)}]"]
        rows.append(row)
    heads = ["model", "data set", "IID", "IID clipping (diff.)", "Non-IID"]
    heads.append("Non-IID clipping (diff.)")
    return Table("Table 1: test accuracy (%) after the last round", heads, rows)


def _paper_table() -> Table:
    rows = [[*case, *numbers] for case, numbers in _PAPER.items()]
    heads = ["model", "data set", "IID", "IID clipping (diff.)", "Non-IID"]
    return Table("The paper's Table 1 (%)", [*heads, "Non-IID clipping (diff.)"], rows)


def _variation_table(variations: BySplit, drops: BySplit) -> Table:
    rows = [
        [case[1], case[0], split, spread(value, 3), spread(drops[case, split], 2)]
        for (case, split), value in variations.items()
    ]
    heads = ["model", "data set", "split", "variation (no unit)", "cost of clipping (points)"]
    caption = f"Coefficient of variation of ‖Δ_i‖ in round {SHOWN_ROUND}, and the cost of clipping"
    return Table(caption, heads, rows)


def _shape_plot(numbers: Numbers, data: str, cases: Sequence[Case]) -> Plot | None:
    """Angle against norm of every client's update, a row a model, a column a split."""
    if not cases:
        return None
    figure = new_figure(2.6 * len(cases) + 0.6)
    panels = figure.subplots(len(cases), 2, squeeze=False, sharey=True)
    for row, case in zip(panels, cases, strict=True):
        shown = [series(numbers, *case, split, FEDAVG)[0] for split in SPLITS]
        longest = max(norm for own in shown for norm in own["norms"])
        for axes, split, own in zip(row, SPLITS, shown, strict=True):
            axes.plot(own["norms"], own["angles"], "o", color=BLUE, ms=3, alpha=0.6)
            mean = (np.mean(own["norms"]), np.mean(own["angles"]))
            axes.plot(*mean, "D", color=CYCLE[-1], ms=6, label="mean")
            axes.set_title(f"{case[1]}, {split}", fontsize="small")
            axes.set_xlim(0, 1.08 * longest)
            axes.set_ylim(0, 180)
            axes.set_yticks(range(0, 181, 45))
            axes.set_xlabel("‖Δ_i‖ (parameter units)", fontsize="small")
            axes.grid(alpha=0.3)
        row[0].set_ylabel("angle to the last\nglobal update (°)", fontsize="small")
    panels[0][0].legend(fontsize="small")
    number = FIGURES[data].removeprefix("figure-")
    caption = (
        f"Figure {number}: updates in round {SHOWN_ROUND} on {data}, in place of {DATA[data]}; a "
        "dot a client."
    )
    return Plot(FIGURES[data], caption, figure)

"""Where clipped FedAvg ends on three scalar quadratics (Zhang et al., Table 4 and Claim 2.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from blackthorn.experiments.engine_run import EngineRun, run_alone
from blackthorn.experiments.finding import Claim, Finding
from blackthorn.experiments.study import Cell, Context, Numbers, Scale, Section, Table, Value
from blackthorn.settings.config import make_config
from blackthorn.strategies.reports import RoundReport
from blackthorn.tasks.problem import load_problem

Keys = dict[str, str | int | float]

SETTING: Keys = {
    "task": "least-squares",
    "dtype": "float64",
    "num-clients": 3,
    "batch-size": 0,
}
INITIAL_POINTS = (-5.0, 0.6, 5.0)
TOLERANCE = 1e-6

# One local step, or so many that every client arrives at the minimum of its own loss: Q = ∞.
ONE: Keys = {"local-steps": 1}
ALL: Keys = {"local-steps": 400, "local-lr": 0.05}
CLIPPED: Keys = {"algorithm": "ce-fedavg", "clip-norm": 1.0}
FED_BACK: Keys = {**CLIPPED, "algorithm": "error-feedback", "clip-units": "parameter"}
# The unit of c: see blackthorn.tasks.least_squares.table_4.
TABLE_4: dict[str, tuple[Keys, float]] = {
    "Q = 1, no clipping": ({**ONE, "local-lr": 0.05, "num-server-rounds": 40}, 0.0),
    "Q = ∞, no clipping": ({**ALL, "num-server-rounds": 3}, 13 / 9),
    "Q = 1, c = 1 (gradient units)": (
        {**ONE, **CLIPPED, "clip-units": "gradient", "local-lr": 0.2, "num-server-rounds": 100},
        1 / 2,
    ),
    "Q = ∞, c = 1 (parameter units)": (
        {**ALL, **CLIPPED, "clip-units": "parameter", "num-server-rounds": 30},
        2 / 3,
    ),
    "Q = ∞, c = 1, error feedback": (
        {**ALL, **FED_BACK, "num-server-rounds": 60},
        13 / 9,
    ),
}
CLAIM_2_1: Keys = {
    "problem": "claim-2.1",
    "problem-c": 2.0,
    "problem-k": 5.0,
    "clip-norm": 2.0,
    "local-lr": 0.3,
    "local-steps": 3,
    "num-server-rounds": 200,
}


def end_point(keys: Keys, initial_point: float) -> float:
    """x after the last round of a run on the engine, from x_1 = `initial_point`."""
    config = make_config({**SETTING, **keys, "initial-point": initial_point})
    end = initial_point

    def watch(report: RoundReport) -> None:
        nonlocal end
        end = float(report.model[0])

    run_alone(EngineRun(config, load_problem(config), [watch]))
    return end


def cells(scale: Scale) -> list[Cell]:
    """Every cell of Table 4 from every initial point, and Claim 2.1's two ways of clipping."""
    del scale
    found = [
        Cell(("table 4", name, start), ended, {**keys, "initial-point": start})
        for name, (keys, _) in TABLE_4.items()
        for start in INITIAL_POINTS
    ]
    for algorithm in ("model-clipping", "ce-fedavg"):
        keys = {**CLAIM_2_1, "algorithm": algorithm, "initial-point": 0.6}
        found.append(Cell(("claim 2.1", algorithm), ended, keys))
    return found


def ended(settings: Mapping[str, Any], context: Context) -> Value:
    """Where a run ends: "end" is x after the last round."""
    del context
    keys = dict(settings)
    return {"end": end_point(keys, keys.pop("initial-point"))}


def section(numbers: Numbers, scale: Scale) -> Section:
    """Table 4 and Claim 2.1."""
    del scale
    ends = {
        name: [numbers["table 4", name, start]["end"] for start in INITIAL_POINTS]
        for name in TABLE_4
    }
    paper = {"Q = 1, no clipping": "0", "Q = ∞, no clipping": "13/9"}
    paper |= dict(zip(list(TABLE_4)[2:], ("1/2", "2/3", ""), strict=True))
    rows = [
        [name, *(f"{round(end, 7) + 0.0:.7f}" for end in own), paper[name]]
        for name, own in ends.items()
    ]
    heads = ["", *(f"from x = {start:g}" for start in INITIAL_POINTS), "the paper's"]
    models, differences = (
        numbers["claim 2.1", name]["end"] for name in ("model-clipping", "ce-fedavg")
    )
    table = Table("Table 4: where FedAvg ends on three quadratics", heads, rows)
    return Section(
        [table_4_claim(ends), claim_2_1(models, differences)],
        [table],
        setting={**SETTING, **{name: str(keys) for name, (keys, _) in TABLE_4.items()}},
    )


def table_4_claim(ends: Mapping[str, Sequence[float]]) -> Claim:
    """Table 4: of the ends from all initial points the one that is furthest from what it should
    be."""
    findings = []
    for name, (_, expected) in TABLE_4.items():
        worst = max(ends[name], key=lambda end: abs(end - expected))
        holds = abs(worst - expected) <= TOLERANCE
        findings.append(Finding(name, f"{round(worst, 7) + 0.0:.7f}", f"{expected:.7f}", holds))
    return Claim(
        "The stationary points of Table 4: clipping may help FedAvg or hurt it.",
        findings,
        note="Error feedback (Clip21), which is not the paper's, takes clipping's bias away. 1/2 "
        "appears where c is measured in units of the gradient step; with the difference "
        "itself clipped at a small η nothing is ever clipped, and the answer is 0.",
    )


def claim_2_1(models: float, differences: float) -> Claim:
    """Model clipping ends at λc/(3 − 2λ), λ = (1 − η_l)^Q, and clipped differences do better."""
    c, k = float(CLAIM_2_1["problem-c"]), float(CLAIM_2_1["problem-k"])
    contraction = (1 - float(CLAIM_2_1["local-lr"])) ** int(CLAIM_2_1["local-steps"])
    expected, minimum = contraction * c / (3 - 2 * contraction), (k - 1) * c / 3
    return Claim(
        "Claim 2.1: model clipping never comes to the minimum, difference clipping does better.",
        [
            Finding(
                f"model clipping, minimum at {minimum:g}",
                f"{models:.7f}",
                f"{expected:.7f}",
                abs(models - expected) <= TOLERANCE,
            ),
            Finding(
                f"difference clipping, minimum at {minimum:g}",
                f"{differences:.7f}",
                f"above {expected:.7f}",
                expected < differences <= minimum + TOLERANCE,
            ),
        ],
    )

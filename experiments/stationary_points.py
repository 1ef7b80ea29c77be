"""Where clipped FedAvg ends on three scalar quadratics (Zhang et al., Table 4 and Claim 2.1)."""

from experiments.engine_run import EngineRun, run_alone
from experiments.finding import Finding
from server_app.config import make_config
from strategies.reports import RoundReport
from tasks.problem import load_problem

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
# The unit of c: see tasks.least_squares.table_4.
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


def table_4_findings() -> list[Finding]:
    """Table 4, from three initial points each: the end that is furthest from what it should be."""
    findings = []
    for name, (keys, expected) in TABLE_4.items():
        ends = [end_point(keys, initial_point) for initial_point in INITIAL_POINTS]
        worst = max(ends, key=lambda end: abs(end - expected))
        holds = abs(worst - expected) <= TOLERANCE
        findings.append(Finding(name, f"{worst:.7f}", f"{expected:.7f}", holds))
    return findings


def claim_2_1_findings(
    c: float = 2.0, k: float = 5.0, local_lr: float = 0.3, local_steps: int = 3
) -> list[Finding]:
    """Model clipping ends at λc/(3 − 2λ), λ = (1 − η_l)^Q, and clipped differences do better."""
    keys: Keys = {"problem": "claim-2.1", "problem-c": c, "problem-k": k, "clip-norm": c}
    keys |= {"local-lr": local_lr, "local-steps": local_steps, "num-server-rounds": 200}
    contraction = (1 - local_lr) ** local_steps
    expected, minimum = contraction * c / (3 - 2 * contraction), (k - 1) * c / 3
    models = end_point({**keys, "algorithm": "model-clipping"}, 0.6)
    differences = end_point({**keys, "algorithm": "ce-fedavg"}, 0.6)
    return [
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
    ]

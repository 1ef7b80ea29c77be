"""By what one model is better than another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


class MetricMissing(ValueError):
    """What models are to be judged by is not among the metrics, or no finite number there."""


@dataclass(frozen=True)
class Judge:
    """A model is better the higher, or the lower, its `metric` is; "": the higher its accuracy or,
    where there is none, the lower its loss."""

    metric: str = ""
    higher: bool = True

    def score(self, metrics: Mapping[str, float]) -> float:
        """A number that is higher for a better model; −∞ where the metrics do not tell."""
        if self.metric:
            worst = -math.inf if self.higher else math.inf
            value = metrics.get(self.metric, worst)
            return value if self.higher else -value
        return metrics["accuracy"] if "accuracy" in metrics else -metrics.get("loss", math.inf)

    def progress(self, metrics: Mapping[str, float]) -> float | None:
        """The score in which a rate's plateau shows: by the metric, or accuracy; None where that is
        not there."""
        name = self.metric or "accuracy"
        return self.score(metrics) if name in metrics else None

    def prefers(self, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
        """Whether an evaluation beats the best so far (None: there is none)."""
        score, beaten = self.score(metrics), -math.inf if best is None else self.score(best)
        return math.isfinite(score) and (not math.isfinite(beaten) or score > beaten)

    def check(self, metrics: Mapping[str, float], rule: str) -> None:
        """Raises MetricMissing, one line, where the metrics lack the named one, or it is not
        finite; without a name, where the output iterate is the `rule` best and they tell nothing.
        """
        if self.metric:
            if math.isfinite(metrics.get(self.metric, math.nan)):
                return
            asked = f"{'maximise' if self.higher else 'minimise'} = {self.metric}"
        elif rule != "best" or "accuracy" in metrics or "loss" in metrics:
            return
        else:
            asked = "output-iterate = best without maximise or minimise"
        given = [k if math.isfinite(v) else f"{k} = {v}" for k, v in metrics.items()]
        raise MetricMissing(
            f"{asked} is not allowed: the evaluation gives {', '.join(given) or 'no metrics'}"
        )

"""The server's step, the bound on updates, and what the run ends with."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.catalogue import WEIGHTED
from blackthorn.settings.declaration import BY_ALGORITHM, KeyGroup, by, unless


class ServerStep(KeyGroup):
    """What the server does with the aggregate."""

    server_lr: float = Field(1.0, gt=0, description="Server learning rate.")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="Server momentum.")
    projection_radius: float = Field(
        0.0,
        ge=0,
        description="Size of the set onto which every step is projected: the ball's radius, half "
        "the box's width, the simplex's sum; 0: no projection.",
    )
    projection: Annotated[Literal["ball", "box", "simplex"], unless("projection-radius", 0.0)] = (
        Field(
            "ball",
            description="That set: an L2 ball, a box |w_j - c_j| <= radius, or the simplex w >= 0, "
            "sum w = radius.",
        )
    )
    projection_center: Annotated[Literal["initial", "origin"], unless("projection-radius", 0.0)] = (
        Field("initial", description="c, what a ball or a box lies around: w_1 or the origin.")
    )
    weighting: Literal["uniform", "num-examples"] = Field(
        "uniform",
        description="Weights of the mean; num-examples are capped by what a client enrolled with.",
    )
    statistics: Literal["average", "server", "local"] = Field(
        "average",
        description="Running statistics of a model's own (BatchNorm's): the mean over the clients "
        "that were kept, their first values, or each client's own.",
    )


class Output(KeyGroup):
    """How long an update may be, and which model the run ends with."""

    clip_norm: float = Field(
        0.0,
        ge=0,
        le=1e12,
        description="Threshold of the algorithms that clip (lambda, C, c); 0: none.",
    )
    clip_units: Annotated[Literal["auto", "gradient", "parameter"], unless("clip-norm", 0.0)] = (
        Field(
            "auto",
            description="Unit of clip-norm: of u = (w - w_i)/local-lr, or of w_i - w; auto: the "
            "algorithm's own (fat-clipping: gradient; ce-fedavg: parameter).",
        )
    )
    clip_quantile: Annotated[float, BY_ALGORITHM] = Field(
        0.0,
        ge=0,
        lt=1,
        description="With noise for privacy: clip-norm is where the threshold begins, which then "
        "follows this quantile of the updates' lengths, by a noised count; 0: it stays.",
    )
    clip_rate: Annotated[float, BY_ALGORITHM] = Field(
        0.2, gt=0, le=10, description="How fast the threshold follows clip-quantile."
    )
    output_iterate: Literal[
        "last", "random-weighted", "uniform", "best", "uniform-average", "weighted-average"
    ] = Field(
        "last",
        description="Which iterate the run ends with; a random one is drawn beforehand, an average "
        "is the mean of w_1 to w_T.",
    )
    maximise: str = Field(
        "", description="Metric by which a model is better the higher it is; empty: accuracy."
    )
    minimise: str = Field(
        "",
        description="Metric by which a model is better the lower it is; both empty: loss, where "
        "there is no accuracy.",
    )
    strong_convexity: Annotated[
        float,
        by("output-iterate", *WEIGHTED),
        by("step-size", "decaying"),
    ] = Field(
        0.0,
        ge=0,
        description="mu in the weights of output-iterate = random-weighted and weighted-average; "
        "m of step-size = decaying.",
    )

"""The server's step, the bound on updates, and what the run ends with."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import KeyGroup, by, unless


class ServerStep(KeyGroup):
    """What the server does with the aggregate."""

    server_lr: float = Field(1.0, gt=0, description="Server learning rate.")
    server_momentum: float = Field(0.0, ge=0, lt=1, description="Server momentum.")
    projection_radius: float = Field(
        0.0, ge=0, description="Radius of the L2 ball around the initial model; 0: no projection."
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
    output_iterate: Literal["last", "random-weighted", "uniform", "best"] = Field(
        "last", description="Which iterate the run ends with; a random one is drawn beforehand."
    )
    strong_convexity: Annotated[
        float, by("output-iterate", "random-weighted"), by("step-size", "decaying")
    ] = Field(
        0.0,
        ge=0,
        description="mu in the weights of output-iterate = random-weighted; m of step-size = "
        "decaying.",
    )

"""How a run is run, watched, written down and resumed: nothing here changes what it computes, but
the clients that a deadline or a quorum leaves out."""

from typing import Annotated, Literal

from pydantic import Field

from blackthorn.settings.declaration import FREE, OF_A_CHAIN, PLACE, SERVER, KeyGroup, by


class Running(KeyGroup):
    """Evaluations, files, deadlines and quorum."""

    evaluate_every: Annotated[int, SERVER, OF_A_CHAIN] = Field(
        1, ge=1, description="Rounds between evaluations."
    )
    instruments: Annotated[bool, OF_A_CHAIN] = Field(
        False,
        description="Measure every client's update each round (norm, angle, tail index); not "
        "private: they read each client's update.",
    )
    checkpoint_every: Annotated[int, SERVER, FREE] = Field(
        0, ge=0, description="Rounds between checkpoints; 0: only the final model."
    )
    report: Annotated[bool, SERVER, FREE] = Field(
        True, description="Draw the plots and write report.html when the run ends."
    )
    tensorboard: Annotated[bool, SERVER, FREE] = Field(
        True, description="Write TensorBoard event files into the run folder."
    )
    mlflow_uri: Annotated[str, SERVER, PLACE, FREE] = Field(
        "",
        description="MLflow tracking server to log the run to (http://host:5000, or a database "
        "such as sqlite:////absolute/mlflow.db); needs MLflow. Empty: none.",
    )
    state_every: Annotated[int, SERVER, FREE] = Field(
        -1,
        ge=-1,
        description="Rounds between states to resume from; -1: after every round, but four times "
        "a second at most; 0: none, no resume.",
    )
    resume: Annotated[str, SERVER, PLACE, FREE] = Field(
        "",
        description="Run folder of a run whose server died: it goes on there, with the same keys, "
        "after its last state.",
    )
    output_dir: Annotated[str, SERVER, PLACE, FREE] = Field(
        "", description="The run's own folder; empty: a new one under runs/ where the server runs."
    )
    round_timeout: Annotated[float, SERVER, FREE] = Field(
        120.0, gt=0, description="Seconds until a round's replies are due."
    )
    client_processes: Annotated[int, SERVER, FREE] = Field(
        1,
        ge=1,
        le=256,
        description="In a simulation, how many clients with a trainer or a project of their own "
        "are trained at a time, each in a process; memory is that of so many.",
    )
    start_timeout: Annotated[float, SERVER, FREE] = Field(
        120.0,
        gt=0,
        description="Seconds to wait for num-clients clients before the first round, and for "
        "anybody when nobody is connected any more.",
    )
    node_authentication: Annotated[bool, SERVER] = Field(
        False,
        description="The SuperNodes' keys are registered: a client id then stays with the key that "
        "had it first, also while that node is away.",
    )
    min_replies: Annotated[int, SERVER] = Field(
        1, ge=0, description="Accepted replies below which a round leaves the model as it was."
    )
    below_quorum: Annotated[Literal["skip", "fail"], SERVER, FREE] = Field(
        "skip",
        description="Rounds with fewer than min-replies: skip them, or fail after fail-after of "
        "them in a row.",
    )
    fail_after: Annotated[int, SERVER, FREE, by("below-quorum", "fail")] = Field(
        3, ge=1, description="Rounds in a row after which the run fails."
    )
    oversample: Annotated[float, SERVER, by("participation", "fixed")] = Field(
        1.0,
        ge=1,
        le=10,
        description="ceil(oversample x clients-per-round) clients are "
        "invited, and the first clients-per-round good replies end the round.",
    )

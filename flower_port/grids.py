"""Which grid of Flower's a strategy was given, and what Flower says through it."""

from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

# A grid's own run, which every kind of grid must know.
from flwr.supercore.run import Run as Run

from .pulling import GridAdapter
from .versions import GRPC, HTTP, NotThisFlower, installed, is_one_of, requirement

# What the SuperLink writes in a client's place when nothing came from it: of a message whose time
# was over when its reply was asked for, of one whose node has gone, ...
MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE = ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE
NO_REPLY = {MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, NODE_UNAVAILABLE}
_SIMULATION = "InMemoryGrid"


def adapter_of(grid: Grid) -> GridAdapter:
    """How replies are pulled through `grid`.

    Raises NotThisFlower for a grid of Flower's that is not known: through its own `pull_messages`
    one client could hold everybody up, or send without a limit.
    """
    name = _flowers_name(grid)
    if name in (None, _SIMULATION):
        return GridAdapter(grid, is_closed=name == _SIMULATION)
    if name == "GrpcGrid" and is_one_of(GRPC):
        from .grpc_grid import GrpcGridAdapter

        return GrpcGridAdapter(grid)
    if name == "HttpGrid" and is_one_of(HTTP):
        from .http_grid import HttpGridAdapter

        return HttpGridAdapter(grid)
    raise NotThisFlower(
        f"the {name} of flwr {installed()} is not known here, and without limits no reply is "
        f"pulled: install {requirement(GRPC)} (gRPC) or {requirement(HTTP)} (HTTP)"
    )


def is_flower_simulation(grid: Grid) -> bool:
    """Whether Flower's own simulation runs the clients."""
    return _flowers_name(grid) == _SIMULATION


def _flowers_name(grid: Grid) -> str | None:
    """The name of Flower's class that `grid` is of; None where it is a class of somebody's own."""
    for kind in type(grid).__mro__:
        if kind is not Grid and kind.__module__.partition(".")[0] == "flwr":
            return kind.__name__
    return None

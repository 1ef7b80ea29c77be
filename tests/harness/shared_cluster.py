"""One cluster for several runs, one after the other: most of a short run is the cluster's start."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from blackthorn.launch.commands.cluster import run_on
from blackthorn.launch.federation.flower_cluster import FlowerCluster, Node
from blackthorn.settings.config import RunConfig

Run = Callable[[RunConfig], dict[str, Any]]


@contextlib.contextmanager
def shared_cluster(nodes: int | Sequence[Node], folder: Path) -> Iterator[Run]:
    """`blackthorn cluster` without its start and its end: what runs a configuration on `nodes`.

    The processes' logs are in `folder`/logs.
    """
    with FlowerCluster(nodes, folder) as flower:
        yield lambda config: run_on(flower, config, Console(quiet=True))

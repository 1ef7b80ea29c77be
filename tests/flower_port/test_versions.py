"""Which Flower is taken for what, and what is said of another one."""

import importlib.metadata
import re
import sys
import tomllib
from types import ModuleType
from typing import Any

import pytest
from flwr.serverapp import Grid
from memory_grid import MemoryGrid

from blackthorn.flower_port import versions
from blackthorn.flower_port.grids import adapter_of, is_flower_simulation
from blackthorn.flower_port.pulling import GridAdapter, SuperLinkGrid
from blackthorn.flower_port.transports import PullingTransport
from blackthorn.flower_port.versions import NotThisFlower, check_grpc
from blackthorn.installation import APP_ROOT
from blackthorn.launch.cli import main
from blackthorn.strategies import GFedAvg


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)


@pytest.mark.parametrize("version", ["1.33.0", "1.34.2"])
def test_the_versions_with_grpc_on_every_hop_are_known(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version)
    check_grpc()


@pytest.mark.parametrize("version", ["1.32.1", "1.35.0", "1.42.0", "2.0.0"])
def test_another_flower_is_refused_by_its_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version)
    with pytest.raises(
        NotThisFlower, match=rf"^flwr {version} is installed.*install flwr>=1\.33,<1\.35 "
    ):
        check_grpc()


@pytest.mark.parametrize("words", ["cluster recipe.toml", "status", "server --host here"])
def test_a_command_that_needs_grpc_says_which_flower_it_needs(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["blackthorn", *words.split()])
    pretend(monkeypatch, "1.42.0")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: flwr 1.42.0 is installed")
    assert "install flwr>=1.33,<1.35" in line


def flowers(name: str) -> Grid:
    """A grid that Flower calls `name`, as far as one can see."""
    methods = {method: lambda *_: None for method in Grid.__abstractmethods__}
    kind = type(name, (Grid,), {**methods, "__module__": "flwr.superlink.grid"})
    return kind()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("GrpcGrid", "1.32.1"),
        ("GrpcGrid", "1.42.0"),
        ("HttpGrid", "1.41.0"),
        ("HttpGrid", "1.43.0"),
        ("NewGrid", "1.34.0"),
    ],
)
def test_an_unknown_grid_of_flower_s_is_an_error_and_no_slower_path(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, version)
    said = (
        f"the {name} of flwr {version} is not known here, and without limits no reply is pulled: "
        "install flwr>=1.33,<1.35 (gRPC) or flwr>=1.42,<1.43 (HTTP)"
    )
    for use in (adapter_of, PullingTransport):
        with pytest.raises(NotThisFlower, match=f"^{re.escape(said)}$"):
            use(flowers(name))
    with pytest.raises(NotThisFlower):
        GFedAvg().start(flowers(name), None, num_rounds=1)  # type: ignore[arg-type]


def test_a_grid_in_this_process_is_asked_for_whole_replies() -> None:
    simulation, own = flowers("InMemoryGrid"), MemoryGrid({})
    assert is_flower_simulation(simulation)
    assert not is_flower_simulation(own)
    for grid in (simulation, own):
        assert type(adapter_of(grid)) is GridAdapter
        assert PullingTransport(grid).is_closed == (grid is simulation)


def test_a_flower_that_is_changed_is_an_error() -> None:
    class OddGrid(SuperLinkGrid):
        def superlink(self) -> Any:
            return self._grid

    with pytest.raises(NotThisFlower, match=r"changed: no odd\.PullAppMessagesRequest$"):
        OddGrid(None, ModuleType("odd"))


def test_the_app_s_range_is_that_of_the_versions_with_grpc() -> None:
    project = tomllib.loads((APP_ROOT / "pyproject.toml").read_text())["project"]
    assert versions.requirement(versions.GRPC) in project["optional-dependencies"]["app"]
    assert "flwr>=1.33" in project["dependencies"]

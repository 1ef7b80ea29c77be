"""The benchmark of rounds over gRPC: what it computes, and that it runs on real processes."""

import tomllib
from pathlib import Path

import pytest

from benchmarks import grpc_rounds
from benchmarks.grpc_apps import Clock
from blackthorn.flower_port import programs
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import make_config


@pytest.mark.parametrize("parameters", (2e4, 1e6))
def test_the_model_has_about_the_wanted_number_of_parameters(
    tmp_path: Path, parameters: float
) -> None:
    config = make_config(grpc_rounds.configuration(parameters, 3, tmp_path / "run"))
    state = prepare(config).problem.state()
    assert sum(array.numel() for array in state.values()) == pytest.approx(parameters, rel=0.01)


def test_the_bundle_differs_from_our_app_by_the_server_app(tmp_path: Path) -> None:
    staged = grpc_rounds.stage("fedavg", tmp_path / "app")
    app = tomllib.loads((staged / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["components"] == {
        "serverapp": "benchmarks.grpc_apps:fedavg",
        "clientapp": "client_app.app:app",
    }
    assert (staged / "benchmarks" / "grpc_apps.py").is_file()


def test_a_row_has_medians_the_ratio_and_the_overhead() -> None:
    seconds = {"ours": [9.0, 1.0, 2.0], "standard": [20.0], "fedavg_quick": [1.6]}
    cells = grpc_rounds.cells(1.1e7, seconds)
    assert cells == ["1.1e+07", "2.00", "20.00", "10.0", "1.60", "+25.0", "-"]


def test_the_clock_gives_the_time_between_two_models(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moments = iter([10.0, 12.0, 15.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    clock = Clock()
    clock.note()
    clock.note()
    clock.note(without=0.5)
    clock.write(tmp_path)
    assert (tmp_path / "seconds.json").read_text() == "[2.0, 2.5]"


def test_an_app_is_unpacked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unpacked = []

    def install(fab: bytes, *_: object) -> Path:
        unpacked.append(fab)
        folder = tmp_path / fab.decode()
        folder.mkdir(exist_ok=True)
        return folder

    monkeypatch.setattr("flwr.cli.install.install_from_fab", install)
    for fab in (b"one", b"two", b"one"):
        assert programs.install_once(fab, tmp_path) == tmp_path / fab.decode()
    assert unpacked == [b"one", b"two"]
    (tmp_path / "one").rmdir()
    programs.install_once(b"one", tmp_path)
    assert unpacked == [b"one", b"two", b"one"]


@pytest.mark.deployment
def test_it_measures_real_rounds(tmp_path: Path) -> None:
    seconds = grpc_rounds.persistent(2e4, 3, tmp_path, ["ours", "fedavg_quick"])
    assert [len(values) for values in seconds.values()] == [2, 2]
    assert all(0 < value < 60 for values in seconds.values() for value in values)
    assert grpc_rounds.phases([tmp_path / "ours"]).keys() >= {"training", "screening"}

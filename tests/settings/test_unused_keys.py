"""Keys that have no effect are told; those that have one are not."""

from pathlib import Path

import pytest
from rich.console import Console

from blackthorn.launch.commands.simulate import simulate
from blackthorn.server_app.run import prepare
from blackthorn.settings.config import ConfigError, make_config
from blackthorn.settings.key_facts import unused_settings

ATTACKED = {"num-clients": 12, "num-byzantine": 2, "attack": "all-ones"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"num-corrupt": 2}, ["num-corrupt = 2 is not used: aggregator = mean"]),
        ({"aggregator": "median", "num-corrupt": 2}, []),
        ({"pre-aggregator": "bucketing", "num-corrupt": 1}, []),
        (
            {"aggregator": "krum", "num-corrupt": 2, "corrupt-fraction": 0.2},
            ["corrupt-fraction = 0.2 is not used: num-corrupt = 2"],
        ),
        (
            {"algorithm": "rage", "aggregator": "krum", "corrupt-fraction": 0.2},
            ["aggregator = krum replaces the rule of algorithm rage"],
        ),
        ({"algorithm": "rage", "rage-stop": "appendix-f", "corrupt-fraction": 0.2}, []),
        (
            {"rage-stop": "appendix-f"},
            ["rage-stop = appendix-f is not used: aggregator = mean"],
        ),
        ({"omniscient": True}, []),
        (
            {"omniscient": True, "num-byzantine": 0, "attack": "none"},
            ["omniscient = true is not used: num-byzantine = 0"],
        ),
        ({"bucket-size": 3}, ["bucket-size = 3 is not used: pre-aggregator = none"]),
    ],
)
def test_a_key_that_nothing_reads_is_named(values: dict[str, object], expected: list[str]) -> None:
    assert unused_settings(make_config({**ATTACKED, **values})) == expected


def test_a_key_that_is_not_used_is_told_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "num-clients": 4,
        "num-server-rounds": 1,
        "num-corrupt": 1,
        "report": False,
        "output-dir": str(tmp_path / "run"),
    }
    simulate(make_config(values), Console(width=200))
    assert "num-corrupt = 1 is not used: aggregator = mean" in capsys.readouterr().out


def test_a_folder_with_files_that_a_run_would_write_over_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("mine = true\n")
    with pytest.raises(ConfigError, match=r"already has config\.toml: choose another folder"):
        prepare(make_config({"output-dir": str(tmp_path)}))
    assert (tmp_path / "config.toml").read_text() == "mine = true\n"


def test_a_rate_that_float32_cannot_divide_by_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"local-lr = 1e-320 is not allowed: 1\.2e-38 to 3e\+38"):
        make_config({"local-lr": 1e-320})

"""deploy/: units of systemd and rules of Prometheus, by the programs that read them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import typer
import yaml
from typer.core import TyperGroup

from blackthorn.launch.cli import app
from blackthorn.launch.federation import measures

UNITS = {"blackthorn-server.service": "", "blackthorn-client@.service": "node0"}
INSTALLED = "/opt/blackthorn/bin/blackthorn"
# Of 10; what is left is the network, and that numba's compiler writes what it runs.
MOST_EXPOSED = 2.0


@pytest.fixture
def deploy(repository: Path) -> Path:
    return repository / "deploy"


def needs(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"there is no {program} (Debian: {package})")
    return path


def call(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units_and_finds_them_hardened(
    deploy: Path, tmp_path: Path, name: str
) -> None:
    analyze = needs("systemd-analyze", "systemd")
    text = (deploy / "systemd" / name).read_text()
    assert INSTALLED in text
    unit = tmp_path / name.replace("@", f"@{UNITS[name]}")
    # Systemd looks whether the program is there.
    program = tmp_path / "blackthorn"
    program.touch(mode=0o755)
    for path in {unit, tmp_path / name}:
        path.write_text(text.replace(INSTALLED, str(program)))
    done = call(analyze, "verify", unit)
    assert (done.returncode, done.stderr) == (0, "")
    broken = tmp_path / "broken.service"
    broken.write_text(unit.read_text().replace("[Service]\n", "[Service]\nNoSuchKey=yes\n"))
    assert "NoSuchKey" in call(analyze, "verify", broken).stderr
    most = f"--threshold={round(10 * MOST_EXPOSED)}"
    done = call(analyze, "security", "--offline=true", most, unit)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", UNITS)
def test_the_units_commands_are_ours(deploy: Path, name: str) -> None:
    text = (deploy / "systemd" / name).read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    # What their comments say is in the settings.
    known = dict(re.findall(r"^#   (\w+)=(.*)$", text, re.MULTILINE))
    line = line.replace("$OPTIONS", known["OPTIONS"])
    line = re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], line)
    _, command, *arguments = shlex.split(line.replace("%i", "node0").replace("%d", "/run"))
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    found: click.Command = group.commands[command]
    found.make_context(command, arguments)
    for key in ("NoNewPrivileges=yes", "ProtectSystem=strict", "KillMode=mixed", "UMask=0077"):
        assert f"\n{key}\n" in text


def test_the_units_differ_in_what_they_start_alone(deploy: Path) -> None:
    both = [(deploy / "systemd" / name).read_text().partition("\nNoNew")[2] for name in UNITS]
    assert both[0] == both[1] != ""


def test_prometheus_takes_the_rules_and_they_fire_when_they_should(deploy: Path) -> None:
    promtool = needs("promtool", "prometheus")
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = call(promtool, *command[:2], deploy / "prometheus" / command[2])
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_is_tried_and_asks_for_what_there_is(deploy: Path) -> None:
    folder = deploy / "prometheus"
    rules = yaml.safe_load((folder / "alerts.yml").read_text())["groups"][0]["rules"]
    tried = yaml.safe_load((folder / "alerts_test.yml").read_text())["tests"]
    fires = {case["alertname"] for test in tried for case in test["alert_rule_test"]}
    assert {rule["alert"] for rule in rules} == fires
    there = {
        one.name + ("_total" if one.kind == "counter" else "")
        for one in (*measures.SERVER, *measures.CLIENT)
    }
    for rule in rules:
        asked = set(re.findall(r"\bblackthorn_\w+", rule["expr"])) - {"blackthorn_server"}
        assert asked <= there, rule["alert"]


def test_the_page_for_operators_says_what_to_do_about_every_alert(
    deploy: Path, repository: Path
) -> None:
    page = (repository / "docs" / "operations.md").read_text()
    names = re.findall(r"alert: (\w+)", (deploy / "prometheus" / "alerts.yml").read_text())
    assert [name for name in names if f"`{name}`" not in page] == []
    for name in ("deploy/systemd", *(f"enable --now {n.removesuffix('.service')}" for n in UNITS)):
        assert name in (repository / "docs" / "deploy.md").read_text()

"""Starting a run at a SuperLink with `flwr run`."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .app_bundle import Scalar, bundle_own_code, stage_app, write_config
from .deployment import DeploymentError
from .process_environment import CONNECTION

_SECONDS = 120.0


def submit(
    app_dir: Path,
    run_config: Mapping[str, Scalar],
    *,
    parts: Sequence[str] | None,
    work: Path,
    env: Mapping[str, str],
    cwd: Path,
    own_code: Sequence[str] = (),
) -> int:
    """Start a run and return its id; `env`'s FLWR_HOME says where the SuperLink is.

    With `parts` only these folders and files of the app (and its pyproject.toml) are bundled, and
    the files that the keys in `own_code` name as FILE.py:FUNCTION. `work` is a
    folder that is made for the purpose. DeploymentError with Flower's own words if it refuses;
    ValueError for a bad folder or value.
    """
    work.mkdir()
    app = app_dir.resolve()
    if parts is not None:
        app = stage_app(app, parts, work / "app")
        run_config = bundle_own_code(app, run_config, own_code)
    config = write_config(run_config, work / "run-config.toml")
    # Flower takes an empty file for a missing one.
    overrides = ["--run-config", str(config)] if run_config else []
    try:
        done = subprocess.run(
            ["flwr", "run", str(app), CONNECTION, "--format", "json", *overrides],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise DeploymentError(f"flwr run: no answer within {_SECONDS:.0f} seconds") from error
    return _run_id(done.stdout, done.stderr)


def _run_id(output: str, errors: str) -> int:
    """The id in the JSON that `flwr run --format json` prints; DeploymentError without one."""
    try:
        reply, _ = json.JSONDecoder().raw_decode(output, output.index("{"))
        return int(reply["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        words = " ".join(f"{output} {errors}".split()) or "no output"
        raise DeploymentError(f"flwr run did not start the run: {words}") from error

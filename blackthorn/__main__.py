"""Entry point of the `blackthorn` command."""

import os
import sys
from pathlib import Path


def app_root() -> Path:
    """Folder that holds the flat packages of the Flower app (and its pyproject.toml)."""
    here = Path(__file__).resolve().parent
    return here if (here / "launch").is_dir() else here.parent


def main() -> None:
    """Put the app's own folder first on the path and run the command line."""
    # Threads that spin while they wait slow everything down tenfold on a machine that is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path.insert(0, str(app_root()))
    from blackthorn.launch.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()

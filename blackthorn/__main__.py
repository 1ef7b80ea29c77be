"""Entry points of the commands `blackthorn` and `blackthorn-superlink`."""

import os


def main() -> None:
    """Run the command line."""
    # Threads that spin while they wait slow everything down tenfold on a machine that is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from blackthorn.launch.cli import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()

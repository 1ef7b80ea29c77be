"""`python -m blackthorn.attacks.collusion`: the colluders' service as a program."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .rendezvous import Rendezvous
from .service import CollusionServer


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="collusion", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:9095", metavar="HOST:PORT")
    parser.add_argument("--colluders", type=int, required=True, help="How many corrupt clients.")
    parser.add_argument(
        "--patience",
        type=float,
        default=10.0,
        help="Seconds to wait for the others after the first has posted (10).",
    )
    parser.add_argument("--certificate", type=Path, help="PEM file; with --key, TLS.")
    parser.add_argument("--key", type=Path, help="PEM file of the certificate's private key.")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; exit code 2 for wrong arguments."""
    options = _options(arguments)
    try:
        if (options.certificate is None) != (options.key is None):
            raise ValueError("--certificate and --key are given together or not at all")
        pem = [path and path.read_bytes() for path in (options.certificate, options.key)]
        rendezvous = Rendezvous(options.colluders, options.patience)
        server = CollusionServer(rendezvous, options.colluders, options.listen, *pem)
    except (ValueError, OSError) as error:
        print(f"collusion: {error}", file=sys.stderr)
        sys.exit(2)
    with server:
        print(f"collusion: {options.colluders} colluders meet at {server.address}", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("collusion: ended", flush=True)


if __name__ == "__main__":
    main()

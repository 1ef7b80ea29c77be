"""Credentials have no place in a run configuration: it is written to files and shown to people."""

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

# user:password@host without a scheme, as scp and people write it.
_BARE = re.compile(r"[^/?#\s@]+:(?!//)[^?#\s]*@")
_SECRET_NAMES = re.compile(
    r"password|passwd|pwd|token|secret|credential|api[-_]?key|access[-_]?key", re.IGNORECASE
)


def check_no_credentials(values: Mapping[str, object]) -> None:
    """Raises ValueError, one line without the secret, for a URI with user information or a password
    under whatever key: whoever sees the configuration would have it."""
    for key, value in values.items():
        if isinstance(value, str) and _holds_credentials(value.strip()):
            raise ValueError(
                f"{key} is not allowed to hold a user's name or password: whoever sees the "
                "configuration would have them; set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD in the environment of the server (and put an MLflow "
                "server in front of a database that wants a password)"
            )


def _holds_credentials(text: str) -> bool:
    if _BARE.match(text):
        return True
    try:
        address = urlsplit(text)
        _ = address.port
    except ValueError:  # user:pass/word@host: the password is not quoted, and read as a port
        return "@" in text
    queries = parse_qsl(address.query.replace(";", "&"), keep_blank_values=True)
    return "@" in address.netloc or any(_SECRET_NAMES.search(name) for name, _ in queries)

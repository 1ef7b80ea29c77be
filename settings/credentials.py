"""Credentials have no place in a run configuration: it is written to files and shown to people."""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

# user:password@host without a scheme, as scp and people write it.
_BARE = re.compile(r"[^/?#\s@]+:(?!//)[^?#\s]*@")
# Of an address everything that may follow its path: no list of names would be all that secrets
# have, and MLflow needs none of it.
_BEHIND_PATH = re.compile(r"[?#;]")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# In a text that may be a path of files: a name that smells, with a value.
_SECRET = re.compile(
    r"[?#;&][^=]*(pass|pwd|token|secret|credential|key|auth|bearer|sig|session|jwt|cookie)[^=]*=",
    re.IGNORECASE,
)
_ALWAYS_AN_ADDRESS = "mlflow-uri"


def check_no_credentials(values: Mapping[str, object]) -> None:
    """Raises ValueError, one line without the value, for a URI with user information, query,
    parameters or fragment under whatever key: whoever sees the configuration would have the
    password or token that is in it."""
    for key, value in values.items():
        if isinstance(value, str) and _may_hold_credentials(key, value.strip()):
            raise ValueError(
                f"{key} is not allowed to hold a user's name or password, or anything after ?, # "
                "or ; in an address: whoever sees the configuration would have them; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment of the "
                "server (and put an MLflow server in front of a database that wants a password)"
            )


def _may_hold_credentials(key: str, text: str) -> bool:
    is_address = key.replace("_", "-") == _ALWAYS_AN_ADDRESS or _ADDRESS.match(text) is not None
    if (_BEHIND_PATH if is_address else _SECRET).search(text) or _BARE.match(text):
        return True
    try:
        address = urlsplit(text)
        _ = address.port
    except ValueError:  # user:pass/word@host: the password is not quoted, and read as a port
        return "@" in text
    return "@" in address.netloc

"""Flower's component `server_app.app:app`: the ServerApp of the package that is installed."""

from pathlib import Path

from blackthorn.installation import needing

with needing("app", "the ServerApp"):
    from blackthorn.server_app.serverapp import app_of

app = app_of(Path(__file__).resolve().parent.parent)

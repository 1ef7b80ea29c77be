"""Flower's component `server_app.app:app`: the ServerApp of the package that is installed."""

from blackthorn.server_app.serverapp import app

__all__ = ["app"]

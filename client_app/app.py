"""Flower's component `client_app.app:app`: the ClientApp of the package that is installed."""

from blackthorn.client_app.clientapp import app

__all__ = ["app"]

"""Fixtures for all tests."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Tests share two cores with the processes they start: threads that spin only get in their way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A shell starts its background jobs with SIGINT ignored, and they hand that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A time limit ends pytest with SIGTERM: what the tests have started is then stopped all the same.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_configure() -> None:
    """Tests make messages that no SuperLink has asked for."""
    # Flower reads the environment, as it is set above, when it is imported.
    from blackthorn.flower_port.synchronous import as_a_task

    as_a_task()


@pytest.fixture(autouse=True)
def audible() -> Iterator[None]:
    """A simulation quiets the log of the process that it is alone in, a ServerApp has it printed;
    tests are many in one."""
    logger = logging.getLogger("blackthorn")
    handlers = list(logger.handlers)
    yield
    logger.setLevel(logging.NOTSET)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> str:
    """Folder with MNIST and Fashion-MNIST in torchvision's layout; skips where none is named."""
    folder = os.environ.get("BLACKTHORN_DATA_DIR", "")
    if not folder:
        pytest.skip("BLACKTHORN_DATA_DIR is not set: it names the folder with MNIST")
    return folder

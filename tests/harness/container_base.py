"""A Docker engine, and the base image of the container tests.

The image is made once a set of pinned packages, then kept.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SECONDS = 600


def require_engine() -> str:
    """The docker command; skips with the reason where no engine answers."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("there is no docker command on this machine")
    answer = subprocess.run([docker, "info"], capture_output=True, text=True, timeout=60)
    if answer.returncode:
        pytest.skip(f"no Docker engine answers: {answer.stderr.strip()[:200]}")
    return docker


def base_image(repository: Path) -> str:
    """The image's name; skips with the reason where it neither is nor can be made.

    BLACKTHORN_TEST_BASE_IMAGE names another one, for example python:3.11-slim where the engine
    can pull it and the build has a network.
    """
    named = os.environ.get("BLACKTHORN_TEST_BASE_IMAGE", "")
    if named:
        return named
    script = repository / "tests" / "harness" / "debian_base_image.sh"
    made_from = (repository / "constraints.txt", script, script.with_name("cuda_stand_ins.py"))
    pinned = b"".join(path.read_bytes() for path in made_from)
    name = f"blackthorn-test-base:{hashlib.sha256(pinned).hexdigest()[:12]}"
    known = subprocess.run(["docker", "image", "inspect", name], capture_output=True, timeout=60)
    if known.returncode == 0:
        return name
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a base image with debootstrap")
    if shutil.which("debootstrap") is None:
        pytest.skip("there is no debootstrap (Debian: apt install debootstrap)")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the base image has Debian's Python 3.11 and takes packages of a 3.11 only")
    made = subprocess.run(
        [str(script), name, sys.executable], capture_output=True, text=True, timeout=_SECONDS
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return name

"""`blackthorn certs`, judged by OpenSSL's own verification and by OpenSSH's reading of keys."""

import shutil
import ssl
import stat
import subprocess
from pathlib import Path

import pytest

from blackthorn.launch.federation.certificates import (
    CertificateError,
    check_server_files,
    client_names,
    make_server_certificate,
    public_key_pem,
)
from blackthorn.launch.federation.certs import make
from blackthorn.settings.config import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certs") / "certs"
    make(path, ["fl.example.org", "192.0.2.7"], ["node0"])
    return path


def handshake(folder: Path, ca: Path, name: str) -> None:
    """A TLS handshake in memory: Python's ssl as both sides. Raises ssl.SSLError."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "server.pem", folder / "server.key")
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(pipes[0], pipes[1], server_side=True)
    client_context = ssl.create_default_context(cafile=str(ca))
    client = client_context.wrap_bio(pipes[1], pipes[0], server_hostname=name)
    for _ in range(10):
        done = 0
        for side in (client, server):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
        if done == 2:
            return
    raise AssertionError("the handshake did not end")


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"])
def test_the_certificate_is_good_for_every_name(folder: Path, name: str) -> None:
    handshake(folder, folder / "ca.crt", name)
    check_server_files(folder, name)


def test_it_is_good_for_no_other_name(folder: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(folder, folder / "ca.crt", "other.example.org")
    with pytest.raises(CertificateError, match=r"other\.example\.org is not in the certificate"):
        check_server_files(folder, "other.example.org")


def test_another_authority_does_not_vouch_for_it(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, ["fl.example.org"], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, tmp_path / "ca.crt", "fl.example.org")


def test_private_files_are_the_owners_alone(folder: Path) -> None:
    private = [folder / "ca.key", folder / "server.key", folder / "clients" / "node0"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_client_key_is_what_flower_takes(folder: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    private = load_ssh_private_key((folder / "clients" / "node0").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert public_key_pem(folder / "clients" / "node0.pub") == public_key_to_bytes(
        private.public_key()
    )


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen")
def test_openssh_reads_the_same_public_key(folder: Path) -> None:
    told = subprocess.run(
        ["ssh-keygen", "-y", "-f", folder / "clients" / "node0"],
        capture_output=True,
        text=True,
        check=True,
    )
    public = (folder / "clients" / "node0.pub").read_text()
    assert told.stdout.split()[:2] == public.split()[:2]
    assert public.split()[2] == "node0"


def test_clients_are_added_later_and_nothing_is_overwritten(tmp_path: Path) -> None:
    make(tmp_path, ["localhost"], ["node0"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make(tmp_path, [], ["ward-7"])
    assert client_names(tmp_path) == ["node0", "ward-7"]
    for hosts, clients in ([], ["node0"]), (["localhost"], []), (["other"], ["node1"]):
        with pytest.raises(ConfigError, match="is there already"):
            make(tmp_path, hosts, clients)
    assert client_names(tmp_path) == ["node0", "ward-7"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_new_server_certificate_from_the_same_authority(tmp_path: Path) -> None:
    make(tmp_path, ["old.example.org"], [])
    (tmp_path / "server.pem").unlink()
    (tmp_path / "server.key").unlink()
    authority = (tmp_path / "ca.crt").read_bytes()
    make(tmp_path, ["new.example.org"], [])
    handshake(tmp_path, tmp_path / "ca.crt", "new.example.org")
    assert (tmp_path / "ca.crt").read_bytes() == authority


def test_a_lost_authority_key_is_said(tmp_path: Path) -> None:
    make(tmp_path, ["localhost"], [])
    for name in ("ca.key", "server.pem", "server.key"):
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"ca\.key is missing"):
        make(tmp_path, ["localhost"], [])


@pytest.mark.parametrize("name", ["", "../node0", "a b", "node0.pub", "-x"])
def test_a_client_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="is not allowed"):
        make(tmp_path, [], [name])


def test_a_host_that_is_neither_name_nor_address_is_refused(tmp_path: Path) -> None:
    make(tmp_path, ["localhost"], [])
    (tmp_path / "server.pem").unlink()
    with pytest.raises(CertificateError, match="neither a host name nor an IP address"):
        make_server_certificate(tmp_path, ["a b"])


def test_a_key_of_another_certificate_is_noticed(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, ["localhost"], [])
    shutil.copy(folder / "server.key", tmp_path / "server.key")
    with pytest.raises(CertificateError, match="is not the key of"):
        check_server_files(tmp_path, "localhost")

"""An operator's command whose server fails at a call: one line with the cause, and what to do."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from blackthorn.launch.cli import main
from blackthorn.launch.federation.addresses import LOOPBACK


class Failing(grpc.GenericRpcHandler):
    """Fails at every call, as it is told."""

    code, words = grpc.StatusCode.INTERNAL, ""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self._fail)

    def _fail(self, _request: Any, context: grpc.ServicerContext) -> None:
        context.abort(self.code, self.words)


@pytest.fixture(scope="module")
def failing() -> Iterator[tuple[Failing, int]]:
    handler = Failing()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    server.start()
    yield handler, port
    server.stop(None)


@pytest.mark.parametrize(
    ("code", "words", "said"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "Socket closed",
            "stopped answering: is it being started again? Give the command once more",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            "the server's database is busy",
            "does not answer: the server's database is busy; give the command once more",
        ),
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded",
            "did not answer in time: it is overloaded, or its database is locked; give the command "
            "once more, and see its state/logs",
        ),
        (
            grpc.StatusCode.INTERNAL,
            "No space left on device: /state/guard/keys.json",
            "failed in a call (INTERNAL: No space left on device: /state/guard/keys.json); see its "
            "state/logs/superlink.log",
        ),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["stop", "1"], ["follow", "1"]])
def test_a_call_that_fails_is_one_line_with_exit_code_1(
    failing: tuple[Failing, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    code: grpc.StatusCode,
    words: str,
    said: str,
) -> None:
    handler, port = failing
    handler.code, handler.words = code, words
    address = f"{LOOPBACK}:{port}"
    monkeypatch.setattr(sys, "argv", ["blackthorn", *command, "--server", address, "--insecure"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == f"failed: {address} {said}\n"

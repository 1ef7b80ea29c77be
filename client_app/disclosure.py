"""What a client may say of itself, by the privacy claim it takes part under.

Everything a client sends besides its model goes through `disclosed`: its replies and its refusals,
in the ClientApp (as the mod `disclosing`) and in the in-process engine. A figure that has no row
here is said only where nothing is claimed.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from flwr.app import ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.typing import ClientAppCallable

from blackthorn.installation import difference
from blackthorn.settings.config import RunConfig, make_config
from blackthorn.settings.privacy_checks import claims_privacy, claims_sample_privacy
from blackthorn.strategies.screening import one_line
from blackthorn.wire import (
    ATTESTED,
    CLIENT_ID,
    CONFIG,
    LIKELIHOOD,
    NUM_EXAMPLES,
    PROBLEM,
    SAMPLE_EPSILON,
    SERVER_CODE,
    UPDATE_NORM,
)

Level = Literal["none", "sample", "client"]

UNTOLD = "its examples cannot be used; under a privacy claim only its own output says why"

# Figure -> the levels at which it is said as it is, and why.
_SAID: dict[str, tuple[tuple[Level, ...], str]] = {
    CLIENT_ID: (("none", "sample", "client"), "who it is, not what it has"),
    SAMPLE_EPSILON: (("none", "sample", "client"), "of the configuration and the rounds alone"),
    UPDATE_NORM: (("none", "sample"), "of the model that is sent: DP-SGD's noise is in it"),
    "evaluation": (("none",), "exact figures of examples; so none are held out for it either"),
    PROBLEM: (("none",), "what is wrong with an example tells of it; UNTOLD in its place"),
    LIKELIHOOD: (("none",), "exact gradient and curvature over its examples; it is refused"),
    NUM_EXAMPLES: (("none",), "one example more or less shows in it; 1 in its place"),
}

logger = logging.getLogger("blackthorn.clients")


class PublicRefusal(ValueError):
    """A refusal whose text is made of the server's request and of configuration alone, of no
    example: the server is told it under every claim."""


def level(config: RunConfig) -> Level:
    """The claim that a run's clients take part under; where both are made, the client's."""
    if claims_privacy(config):
        return "client"
    return "sample" if claims_sample_privacy(config) else "none"


@contextmanager
def kept_from_the_server(config: RunConfig) -> Iterator[None]:
    """Where clients run in a process of the server's: what they log, which may tell of an example,
    is shown to nobody under a claim."""
    before = logger.level
    logger.setLevel(before if level(config) == "none" else logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def check_claim(config: RunConfig, claimed: bool) -> None:
    """Raises PublicRefusal where the server has `claimed` its clients' privacy, and this client's
    configuration does not: it would say what the claim withholds, or noise by a seed."""
    if claimed and level(config) != "client":
        raise PublicRefusal(
            "the server claims the clients' privacy, and this client's run configuration does not: "
            "set claim-privacy = true, insecure-seeded-noise = false and the noise that the server "
            "has"
        )


def check_code(message: Message) -> None:
    """Raises PublicRefusal where the server has another code than this client.

    The client's half of an algorithm runs here, whatever the server has. A server that does not
    say is no Blackthorn of this kind, and its rounds are checked one by one.
    """
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    code = config.get(SERVER_CODE)
    unlike = difference(one_line(str(code)), "the server") if code is not None else None
    if unlike is not None:
        raise PublicRefusal(unlike)


def may_say(config: RunConfig, figure: str) -> bool:
    """Whether a client says ``figure`` as it is; one that has no row, where nothing is claimed."""
    return _is_said(level(config), figure)


def check_tells(claim: Level, figure: str) -> None:
    """Raises PublicRefusal where the claim does not let a client send ``figure`` in place of its
    model ("": it sends the model)."""
    if figure and not _is_said(claim, figure):
        _, why = _SAID.get(figure, ((), ""))
        raise PublicRefusal(f"under a privacy claim no client sends its {figure}: {why}")


def _is_said(claim: Level, figure: str) -> bool:
    levels, _ = _SAID.get(figure, (("none",), ""))
    return claim in levels


def said_in_a_round(claim: Level, metrics: MetricRecord) -> MetricRecord:
    """What any client says beside its model: under a claim that it counts, and nothing that its
    app has measured, whatever the name; the server knows the rest from its own message."""
    return metrics if claim == "none" else MetricRecord({NUM_EXAMPLES: 1})


def disclosed(
    config: RunConfig, reply: Message, node_config: Mapping[str, object] | None = None
) -> Message:
    """The reply with nothing in its metrics and its text that the claim does not allow.

    Where on its machine a client keeps its data (`data-path` of ``node_config``) is its own
    affair under every claim. A model's arrays pass: they are what the claim is about, and so does
    the attestation, which is made of the server's message alone.
    """
    if not reply.has_content():
        return reply
    for name, record in list(reply.content.items()):
        if isinstance(record, MetricRecord):
            _withhold(level(config), record)
        if isinstance(record, ConfigRecord) and name != ATTESTED:
            if PROBLEM in record:
                record[PROBLEM] = told_problem(config, str(record[PROBLEM]), node_config)
            elif level(config) != "none":
                del reply.content[name]
    return reply


def _withhold(claim: Level, metrics: MetricRecord) -> None:
    if claim == "none":
        return
    for figure in list(metrics):
        if figure == NUM_EXAMPLES:
            metrics[figure] = 1
        elif not _is_said(claim, figure):
            del metrics[figure]


def told_problem(
    config: RunConfig, problem: str, node_config: Mapping[str, object] | None = None
) -> str:
    """What the server is told of a problem: the text without the path of the data, or UNTOLD."""
    if not may_say(config, PROBLEM):
        return UNTOLD
    path = str((node_config or {}).get("data-path", ""))
    return problem.replace(path, Path(path).name) if path else problem


def disclosing(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: whatever the app answers goes through `disclosed`, and what it raises, whose
    text Flower sends to the server, through `told_problem`; the whole is in the client's log."""
    config = make_config(context.run_config)
    try:
        reply = call_next(message, context)
        if reply.has_error() and not may_say(config, PROBLEM):
            raise ValueError(f"the app answers with an error: {reply.error.reason}")
    except PublicRefusal:
        raise
    except Exception as error:
        told = told_problem(config, str(error), context.node_config)
        if told == str(error):
            raise
        logger.exception("a message of run %d was not answered", context.run_id)
        raise ValueError(told) from None
    return disclosed(config, reply, context.node_config)

"""Every limit of the guard: its name, its default, and why."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

MIB = 2**20


def _limit(default: float, reason: str) -> float:
    made: float = field(default=default, metadata={"reason": reason})
    return made


@dataclass(frozen=True)
class Limits:
    """The settings, each with its reason; `--limit NAME=VALUE` changes one."""

    request_bytes: float = _limit(
        16 * MIB, "the largest request: Flower's nodes send arrays in chunks of 5 MiB"
    )
    announcement_bytes: float = _limit(
        1 * MIB, "the largest request that uploads nothing: ids, or the text of an error"
    )
    request_seconds: float = _limit(
        120, "a request of a registered key is whole by then: a chunk takes 45 s at 1 Mbit/s"
    )
    stranger_seconds: float = _limit(
        10, "a request of an unknown key is whole by then, and a TLS handshake done"
    )
    stranger_bytes: float = _limit(
        64 * 1024, "the largest request of an unknown key: it can only ask to be let in"
    )
    stranger_calls: float = _limit(
        8, "requests of unknown keys served at a time, by threads of their own; as many may wait"
    )
    stranger_connections: float = _limit(
        32, "connections of one address on which no registered key has spoken yet"
    )
    idle_connection_seconds: float = _limit(
        20, "a connection on which no registered key has spoken by then is closed"
    )
    key_connections: float = _limit(8, "connections of one key: a SuperNode has one")
    key_connections_a_minute: float = _limit(
        60, "new connections of one key in a minute: a SuperNode reconnects every few seconds"
    )
    key_calls: float = _limit(
        8, "requests of one key at a time, until their answers are sent: a SuperNode has four"
    )
    key_calls_a_second: float = _limit(
        300, "requests of one key, beyond which they wait: each costs some 2 ms of a core"
    )
    key_messages: float = _limit(
        64,
        "messages of one key that are remembered: a second answer is known by them",
    )
    objects_factor: float = _limit(
        2, "an answer's objects, in those of its message: 2.5 ms of the database each"
    )
    objects_more: float = _limit(64, "and so many more, for what is no array")
    object_depth: float = _limit(8, "levels of an answer's objects: Flower's messages have five")
    bytes_factor: float = _limit(2, "an answer's bytes, in those of its message")
    bytes_more: float = _limit(1 * MIB, "and so many more, for what is no array")
    open_answers: float = _limit(
        2, "answers of one key, the last announced, whose objects are taken"
    )
    announcements: float = _limit(
        8, "times that an answer is announced once more: a node does so whose connection broke"
    )
    offences: float = _limit(
        20, "requests in an hour that no honest program makes, after which the key is barred"
    )
    log_line: float = _limit(1000, "characters of a line of the log; the rest is cut off")
    log_bytes: float = _limit(
        50 * MIB, "of the log's file, which is begun anew then; one old file is kept"
    )

    @classmethod
    def changed(cls, settings: Iterable[str]) -> "Limits":
        """The defaults but for NAME=VALUE. Raises ValueError with one line."""
        values = {}
        names = {one.name.replace("_", "-"): one.name for one in fields(cls)}
        for setting in settings:
            name, sign, text = setting.partition("=")
            if not sign or name not in names:
                raise ValueError(
                    f"--limit {setting}: allowed are NAME=VALUE with {', '.join(names)}"
                )
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 < value < float("inf"):
                raise ValueError(f"--limit {setting}: allowed is a number > 0")
            values[names[name]] = value
        return cls(**values)


def table() -> list[str]:
    """The limits as lines of a Markdown table, for docs/security.md."""
    lines = ["| limit | default | why |", "| --- | --- | --- |"]
    for one in fields(Limits):
        name, reason = one.name.replace("_", "-"), one.metadata["reason"]
        lines.append(f"| `{name}` | {one.default:.10g} | {reason} |")
    return lines

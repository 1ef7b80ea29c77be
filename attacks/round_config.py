"""What a train message tells a corrupt client about the round, and how an honest one replies."""

import hashlib

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from blackthorn.wire import ARRAYS, ATTESTED, CONFIG, METRICS, NUM_EXAMPLES, RULE, SERVER_ROUND


def round_config(message: Message) -> ConfigRecord:
    """The round's instructions; empty if the message has none."""
    return message.content.config_records.get(CONFIG, ConfigRecord())


def attestation(message: Message) -> ConfigRecord:
    """The word of a client that has carried out the message's rule, in an attacker's own writing:
    as an honest client makes it."""
    numbers = dict(message.content.config_records[RULE])
    name = numbers.pop("name")
    server_round = int(number(round_config(message), SERVER_ROUND))
    exact = sorted((key, float(value)) for key, value in numbers.items())  # type: ignore[arg-type]
    said = repr(("this ClientApp has carried out the rule", server_round, name, exact))
    return ConfigRecord({"sha256": hashlib.sha256(said.encode()).hexdigest()})


def honest_reply(order: Message, num_examples: int) -> Message:
    """The order's own model, as if training had changed nothing, and the word that it has."""
    arrays = order.content.array_records[ARRAYS]
    metrics = MetricRecord({NUM_EXAMPLES: num_examples})
    content = RecordDict({ARRAYS: arrays, METRICS: metrics})
    if RULE in order.content:
        content[ATTESTED] = attestation(order)
    return Message(content, reply_to=order)


def expected_cohort(context: Context) -> int:
    """K as a corrupt client can know it, from the run's configuration: how many are asked in a
    round, the mean for Poisson participation. No message tells it how many were, since that would
    tell who was. 1 where the run is none of ours.
    """
    run = context.run_config
    count = run.get("num-clients", 1)
    if run.get("participation") in ("fixed", "with-replacement"):
        count = run.get("clients-per-round", count)
    if run.get("participation") == "poisson":
        count = float(run.get("sample-rate", 1.0)) * float(count)
    if run.get("participation") == "rotating":
        count = float(count) / float(run.get("bands", 1))
    return max(1, round(float(count)))


def number(config: ConfigRecord, key: str, default: int | float | None = None) -> int | float:
    """The number under `key`; ValueError if there is none and no default."""
    value = config.get(key, default)
    if isinstance(value, int | float):
        return value
    raise ValueError(
        f"an attack needs a number under {key!r} in a train message's {CONFIG!r} record; "
        f"it holds {dict(config)}"
    )

"""A PyTorch project as people have them: a network with BatchNorm, data of its own, a loop of its
own; and its ClientApp, plain, with the mod, and with a round's optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from memory_grid import MemoryGrid, runs
from torch import Tensor, nn

from blackthorn.client_app import Mod, Round, mod

Prepare = Callable[[Message, nn.Module], torch.optim.Optimizer]
STEPS, RATE, EXAMPLES = 4, 0.125, 24


def network(norm: bool = True) -> nn.Module:
    """The same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(5, 6),
            nn.BatchNorm1d(6) if norm else nn.Identity(),
            nn.ReLU(),
            nn.Linear(6, 3),
        )


def data(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + client)
    x = torch.randn(EXAMPLES, 5, generator=generator) + client
    return x, torch.randint(0, 3, (EXAMPLES,), generator=generator)


def plain_sgd(message: Message, model: nn.Module) -> torch.optim.Optimizer:
    del message
    return torch.optim.SGD(model.parameters(), lr=RATE)


def train_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, client: int, steps: int = STEPS
) -> float:
    """`steps` steps, each on all examples."""
    x, y = data(client)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def project_app(
    client: int,
    prepare: Prepare = plain_sgd,
    mods: Sequence[Any] = (),
    model: Callable[[], nn.Module] = network,
    steps: int = STEPS,
    replies: bool = False,
) -> ClientApp:
    """As Flower's quickstart has it, with `prepare` in place of its optimizer. `replies`: with what
    a round's `reply` makes."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        net = model()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        loss = train_loop(net, prepare(message, net), client, steps)
        if replies:
            return Round.of(message).reply(net, {"train-loss": loss}, EXAMPLES)
        metrics = MetricRecord({"num-examples": EXAMPLES, "train-loss": loss})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def project_grid(clients: int = 3, **options: Any) -> MemoryGrid:
    """Client i on node 10 + i; without `mods`, with the mod."""
    options.setdefault("mods", [mod])
    return MemoryGrid(
        {
            10 + i: runs(
                project_app(i, **options), **{"partition-id": i, "num-partitions": clients}
            )
            for i in range(clients)
        }
    )


def counted_mod() -> Mod:
    return Mod(num_examples=lambda _: EXAMPLES)


def plain_fedavg(rounds: int, clients: int = 3, norm: bool = True) -> dict[str, Tensor]:
    """The state of FedAvg written out: the mean of all floating entries after every round."""
    state = {name: value.clone() for name, value in network(norm).state_dict().items()}
    for _ in range(rounds):
        states = []
        for client in range(clients):
            net = network(norm)
            net.load_state_dict(state)
            train_loop(net, torch.optim.SGD(net.parameters(), lr=RATE), client)
            states.append(net.state_dict())
        for name in state:
            if state[name].is_floating_point():
                state[name] = torch.stack([one[name].double() for one in states]).mean(0).float()
    return state

"""A training loop of one's own with a round's optimizer: the algorithm's, to rounding or in law."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor, nn

from blackthorn.client_app import Round
from blackthorn.client_app.disclosure import PublicRefusal
from blackthorn.client_app.training import train_clients
from blackthorn.strategies.biclip import BiClipGradient
from blackthorn.strategies.clipping import ClipGradient
from blackthorn.strategies.fed_langevin import LangevinSteps
from blackthorn.strategies.global_model import ModelLayout
from blackthorn.strategies.local_rule import LocalRule, LocalSGD
from blackthorn.tasks.datasets import Examples
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.labelled import cross_entropy
from blackthorn.tasks.models import build_model
from blackthorn.tasks.shards import ExampleShard

LR, STEPS = 0.25, 5


def message_of(rule: LocalRule, state: dict[str, Tensor], lr: float = LR, **told: Any) -> Message:
    """A train message as a strategy writes it."""
    arrays = ArrayRecord(dict(ArrayRecord(state).items()))
    layout = ModelLayout.of({name: array.numpy() for name, array in arrays.items()})
    config = ConfigRecord({"server-round": 2, "local-lr": lr, "client-id": 1, "nonce": "n"})
    for name, value in told.items():
        config[name.replace("_", "-")] = value
    content = RecordDict({"arrays": arrays, "config": config, "rule": rule.sent.record()})
    content["layout"] = ConfigRecord({"parameters": list(layout.trainable)})
    return Message(content, dst_node_id=7, message_type="train")


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    module = build_model("mlp-6", (7,), 3, 4)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 7, generator=generator)
    return module, x, torch.randint(0, 3, (20,), generator=generator)


def looped(module: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


def sent_vector(reply: Message, module: nn.Module) -> np.ndarray:
    arrays = reply.content.array_records["arrays"]
    names = [name for name, _ in module.named_parameters()]
    return np.concatenate([arrays[name].numpy().reshape(-1) for name in names])


RULES: dict[str, LocalRule] = {
    "sgd": LocalRule(),
    "clip-gradient": ClipGradient(0.05, STEPS),
    "biclip-gradient": BiClipGradient(0.001, 0.01, STEPS),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("how", ["optimizer", "wrap"])
def test_an_own_loop_on_the_same_batches_gives_our_own_trainer_s_model(name: str, how: str) -> None:
    rule = RULES[name]
    module, x, y = problem()
    model = FlatModel(build_model("mlp-6", (7,), 3, 4), cross_entropy)
    start = model.flatten(module.state_dict())
    shard = ExampleShard(Examples(x, y))
    spec = LocalSGD(STEPS, 0, LR, rule=rule)
    expected, _ = train_clients(model, start, [shard], spec, [np.random.default_rng(0)])
    round_ = Round.of(message_of(rule, module.state_dict()))
    if how == "wrap":
        optimizer = round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    else:
        optimizer = round_.optimizer(module)
    looped(module, optimizer, x, y)
    reply = round_.reply(module, {"train-loss": 1.0}, 20)
    np.testing.assert_allclose(sent_vector(reply, module), expected[0], rtol=1e-5, atol=1e-6)
    assert round_.attestation.is_in(reply.content)
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 20, "train-loss": 1.0}
    assert not np.allclose(expected[0], start, atol=1e-4)


def test_weight_decay_is_part_of_the_gradient_that_is_clipped() -> None:
    rule = ClipGradient(0.05, STEPS)
    module, x, y = problem()
    model = FlatModel(build_model("mlp-6", (7,), 3, 4), cross_entropy)
    start = model.flatten(module.state_dict())
    spec = LocalSGD(STEPS, 0, LR, weight_decay=0.5, rule=rule)
    shard = ExampleShard(Examples(x, y))
    expected, _ = train_clients(model, start, [shard], spec, [np.random.default_rng(0)])
    round_ = Round.of(message_of(rule, module.state_dict()))
    looped(module, round_.optimizer(module, weight_decay=0.5), x, y)
    np.testing.assert_allclose(model.flatten(module.state_dict()), expected[0], atol=1e-6)


def test_the_joint_gradient_is_clipped_before_adam_s_step() -> None:
    """torch's own clip_grad_norm_ before each step is the oracle."""
    rule = ClipGradient(0.05, STEPS)
    module, x, y = problem()
    other, _, _ = problem()
    round_ = Round.of(message_of(rule, module.state_dict()))
    looped(module, round_.wrap(torch.optim.AdamW(module.parameters(), lr=0.01)), x, y)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    for _ in range(STEPS):
        plain.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)
        plain.step()
    for own, expected in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


def test_a_schedule_of_rates_works_on_a_wrapped_optimizer() -> None:
    module, x, y = problem()
    round_ = Round.of(message_of(ClipGradient(1.0, STEPS), module.state_dict()))
    optimizer = round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == LR / 2**STEPS


# How many steps.


def test_one_step_too_many_is_refused_when_it_is_made() -> None:
    module, x, y = problem()
    round_ = Round.of(message_of(ClipGradient(1.0, STEPS - 1), module.state_dict()))
    optimizer = round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    with pytest.raises(PublicRefusal, match="more steps than the rule's 4: its bound would not"):
        looped(module, optimizer, x, y)


def test_fewer_steps_are_told_and_none_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    module, x, y = problem()
    round_ = Round.of(message_of(ClipGradient(1.0, STEPS + 2), module.state_dict()))
    with pytest.raises(PublicRefusal, match="every step of the training, and it was not asked for"):
        round_.reply(module)
    optimizer = round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    with pytest.raises(PublicRefusal, match="no step of its optimizer was made"):
        round_.reply(module)
    looped(module, optimizer, x, y)
    with caplog.at_level("INFO", logger="blackthorn"):
        round_.reply(module)
    assert "round 2: 5 steps were made, the rule's number is 7" in caplog.text


def langevin(**more: Any) -> LangevinSteps:
    return LangevinSteps(LR, 1.0, 0.5, 0.0, **more)


def test_a_step_size_that_decays_needs_its_number_of_steps() -> None:
    module, x, y = problem()
    told = {"share": 0.5, "total_examples": 40, "shared_seed": 3}
    rule = langevin(strong_convexity=1.0, local_steps=STEPS + 1)
    round_ = Round.of(message_of(rule, module.state_dict(), **told))
    looped(module, round_.optimizer(module), x, y)
    with pytest.raises(PublicRefusal, match="5 steps were made, the rule's number is 6"):
        round_.reply(module)


# FA-LD.


def test_another_optimizer_is_refused_for_fa_ld() -> None:
    module, _, _ = problem()
    told = {"share": 0.5, "total_examples": 40}
    round_ = Round.of(message_of(langevin(), module.state_dict(), **told))
    with pytest.raises(ValueError, match="would sample from another law"):
        round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    with pytest.raises(ValueError, match=r"weight_decay = 0\.1 is not allowed"):
        round_.optimizer(module, weight_decay=0.1)


def test_fa_ld_equals_our_own_trainer_with_the_same_noise() -> None:
    module, x, y = problem()
    model = FlatModel(build_model("mlp-6", (7,), 3, 4), cross_entropy)
    start = model.flatten(module.state_dict())
    told = {"share": 0.5, "total_examples": 40, "shared_seed": 3}
    rule = LangevinSteps(1e-3, 1.0, 0.5, 2.0)
    round_ = Round.of(message_of(rule, module.state_dict(), 1e-3, **told))
    looped(module, round_.optimizer(module, generator=np.random.default_rng(8)), x, y)
    steps = rule.steps(
        LocalSGD(STEPS, 0, 1e-3), 1, lambda _: round_._told(np.random.default_rng(8))
    )
    shard = ExampleShard(Examples(x, y))
    expected, _ = train_clients(model, start, [shard], steps, [np.random.default_rng(0)])
    reply = round_.reply(module)
    np.testing.assert_allclose(sent_vector(reply, module), expected[0], rtol=1e-4, atol=1e-5)


class Linear(nn.Module):
    """θ [d] in float64, whose mean loss is that of a Gaussian model."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start))


def test_a_chain_through_the_round_s_optimizer_has_the_posterior_s_law() -> None:
    """Two clients, one step a round, full participation: SGLD on the Gaussian posterior, mean A⁻¹b
    and covariance τ(A − ηA²/2)⁻¹; by 3,000 chains side by side in one vector of parameters."""
    eta, tau, chains, rounds = 0.02, 0.7, 3000, 60
    rng = np.random.default_rng(2)
    counts = [4, 8]
    inputs = [rng.normal(size=(n, 2)) for n in counts]
    targets = [rng.normal(size=n) for n in counts]
    prior = 1.5
    a = sum(x.T @ x for x in inputs) + prior * np.eye(2)
    b = sum(x.T @ t for x, t in zip(inputs, targets, strict=True))
    rule = LangevinSteps(eta, tau, 0.6, prior)
    theta = np.zeros((chains, 2))
    own = [np.random.default_rng(10 + i) for i in range(2)]
    for server_round in range(rounds):
        models = []
        for i, (x, t) in enumerate(zip(inputs, targets, strict=True)):
            module = Linear(theta)
            told = {"share": counts[i] / 12, "total_examples": 12, "shared_seed": 9}
            message = message_of(rule, module.state_dict(), eta, **told)
            message.content.config_records["config"]["server-round"] = server_round + 1
            round_ = Round.of(message)
            optimizer = round_.optimizer(module, generator=own[i])
            residuals = module.theta @ torch.tensor(x).T - torch.tensor(t)
            # The mean over the batch of ½ r², for every chain of its own.
            (residuals.square().mean(dim=1) / 2).sum().backward()
            optimizer.step()
            arrays = round_.reply(module).content.array_records["arrays"]
            models.append(arrays["theta"].numpy())
        theta = np.average(models, axis=0, weights=counts)
    mean, covariance = np.linalg.solve(a, b), tau * np.linalg.inv(a - eta * a @ a / 2)
    error = np.sqrt(np.diag(covariance) / chains)
    assert (np.abs(theta.mean(axis=0) - mean) < 4.5 * error).all()
    np.testing.assert_allclose(np.cov(theta.T), covariance, rtol=0.15, atol=0.1 * covariance.max())


# What is refused in one line.


def test_a_model_that_is_not_the_server_s_is_one_line() -> None:
    module, _, _ = problem()
    round_ = Round.of(message_of(LocalRule(), module.state_dict()))
    with pytest.raises(ValueError, match=r"the model trains no parameter 'hidden1\.weight', which"):
        round_.optimizer(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"the model has no 'hidden1\.weight', which the server"):
        round_.load(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'hidden1\.weight' of shape None, the server's is"):
        round_.reply(nn.Linear(3, 3))


def test_a_round_has_one_optimizer() -> None:
    module, _, _ = problem()
    round_ = Round.of(message_of(LocalRule(), module.state_dict()))
    round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))
    with pytest.raises(ValueError, match="the round has its optimizer"):
        round_.wrap(torch.optim.SGD(module.parameters(), lr=LR))


def test_a_closure_is_refused_where_gradients_are_clipped() -> None:
    module, x, y = problem()
    round_ = Round.of(message_of(ClipGradient(1.0, STEPS), module.state_dict()))
    optimizer = round_.wrap(torch.optim.LBFGS(module.parameters()))

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        return float(loss)

    with pytest.raises(ValueError, match="a closure computes gradients within the step"):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"bound": 1.0, "noise-multiplier": 1.0}, "noise-multiplier = 1.0 and noise-shares = None"),
        ({"bound": 1.0, "noise-multiplier": -1.0, "noise-shares": 2}, "noise-multiplier = -1.0"),
        ({"bound": 1.0, "noise-multiplier": 1.0, "noise-shares": 0.5}, "noise-shares = 0.5"),
    ],
)
def test_noise_that_is_none_is_refused(numbers: dict[str, float], expected: str) -> None:
    module, _, _ = problem()
    message = message_of(LocalRule(), module.state_dict())
    message.content["rule"] = ConfigRecord({"name": "clip-update", **numbers})
    with pytest.raises(ValueError, match=expected):
        Round.of(message)


def test_a_half_precision_model_is_trained_and_sent_in_its_dtype() -> None:
    module = nn.Linear(3, 2).half()
    round_ = Round.of(message_of(ClipGradient(1.0, 1), module.state_dict()))
    optimizer = round_.optimizer(module)
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    before = module.weight.detach().float().clone()
    optimizer.step()
    reply = round_.reply(module)
    found = reply.content.array_records["arrays"]["weight"].numpy()
    assert found.dtype == np.float16
    expected = before - LR / np.sqrt(8)
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=2e-3, atol=1e-3)

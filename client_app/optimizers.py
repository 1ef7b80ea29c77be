"""A rule's steps as one of torch's optimizers, and its part of the steps of any other."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blackthorn.strategies.local_rule import LocalRule, LocalSGD, LocalSteps, RoundOf

# The number of a step, from 0, which it counts.
CountStep = Callable[[], int]


class RuleOptimizer(torch.optim.Optimizer):
    """Each `step` is the rule's, over all `parameters` as one vector, in float32 or, where one of
    them is, float64."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        local_lr: float,
        steps: LocalSteps,
        count: CountStep,
    ) -> None:
        super().__init__(parameters, {"lr": local_lr})
        self._parameters = list(parameters)
        self._steps = steps
        self._count = count
        # w_t: the round has put the server's model into the parameters.
        self._start = _joined(self._parameters)

    @staticmethod
    def steps_of(
        rule: LocalRule, local_lr: float, weight_decay: float, round_of: RoundOf
    ) -> LocalSteps:
        """The steps of one client. Raises ValueError for a weight decay beside a prior."""
        if weight_decay and rule.has_own_steps:
            raise ValueError(
                f"weight_decay = {weight_decay} is not allowed with the rule {rule.name}: the "
                "prior is its own"
            )
        # How many steps there are, and of how many examples, is the loop's.
        sgd = LocalSGD(1, 0, local_lr, weight_decay, rule)
        return rule.steps(sgd, 1, round_of)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step down the gradients; `closure`, where it is given, computes them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = self._count()
        w = _joined(self._parameters)
        gradient = _joined([_gradient(one) for one in self._parameters]).to(w.dtype)
        self._steps.move(w[None], gradient[None], number, [0], self._start)
        _put(w, self._parameters)
        return loss


def trained_by_the_rule(
    model: nn.Module, names: Sequence[str], rule: LocalRule
) -> list[nn.Parameter]:
    """The model's trainable parameters, those of w first and in its order.

    Raises ValueError where w has one that the model does not train, or twice, and where a rule
    whose steps are its own would leave one out.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    trainable = {name: one for name, one in every.items() if one.requires_grad}
    absent = [name for name in names if name not in trainable]
    if absent:
        raise ValueError(f"the model trains no parameter {absent[0]!r}, which the server sent")
    found = {id(trainable[name]): trainable[name] for name in names}
    if len(found) < len(names):
        tied = [name for name in names if sum(every[n] is every[name] for n in names) > 1]
        raise ValueError(
            f"{tied[0]!r} and {tied[1]!r} are one parameter, which would count twice: give the "
            "server the module, strategy.start(grid, model), or leave the second name out"
        )
    for name, one in trainable.items():
        if id(one) not in found and rule.has_own_steps:
            raise ValueError(f"{name!r} is trained, but no part of what the server sent")
        found.setdefault(id(one), one)
    return list(found.values())


def clip_before_steps(
    optimizer: torch.optim.Optimizer, rule: LocalRule, count: CountStep
) -> torch.optim.Optimizer:
    """The optimizer, before each of whose steps the joint gradient becomes the rule's.

    Its parameters hold w_t when this is called.
    """
    starts = {
        id(one): one.detach().clone() for group in optimizer.param_groups for one in group["params"]
    }

    def before(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        count()
        if not rule.changes_gradients:
            return
        # The first of them is the optimizer.
        if args[1:] or kwargs.get("closure") is not None:
            raise ValueError(
                "a closure computes gradients within the step, where they cannot be clipped: call "
                "backward() before step()"
            )
        own_parameters = [one for group in own.param_groups for one in group["params"]]
        moved = [one for one in own_parameters if one.grad is not None]
        held = [one.grad for one in moved]
        if held:
            w, start = _joined(moved)[None], _joined([starts[id(one)] for one in moved])
            _put(rule.on_gradient(_joined(held)[None].clone(), w, start)[0], held)

    optimizer.register_step_pre_hook(before)
    return optimizer


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _joined(parts: Sequence[Tensor]) -> Tensor:
    wide = any(part.dtype == torch.float64 for part in parts)
    dtype = torch.float64 if wide else torch.float32
    return torch.cat([part.detach().reshape(-1).to(dtype) for part in parts])


def _put(vector: Tensor, parts: Sequence[Tensor]) -> None:
    sizes = [math.prod(part.shape) for part in parts]
    with torch.no_grad():
        for part, own in zip(parts, vector.split(sizes), strict=True):
            part.copy_(own.view(part.shape))

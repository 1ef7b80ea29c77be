"""A module seen as a function of one flat vector, for one client or for many at once."""

import copy
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

ExampleLoss = Callable[[Tensor, Tensor], Tensor]
Descent = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, float, Tensor], Tensor | None]
LossAndGradient = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
BATCHINGS = ("vmap", "loop")


class FlatModel:
    """``module`` as a function of w [d], all its trainable floating-point parameters in the
    order of ``named_parameters()``; buffers and frozen parameters keep the module's values.

    ``example_loss(outputs [n, ...], y [n, ...]) -> [n]``. The dtype of the vector given rules:
    floating inputs are converted to it. The module is put into evaluation mode and stays there,
    so that nothing but w changes an output: neither dropout nor running statistics. A module of
    one's own may still draw, or remember, in ``forward``.

    ``batching`` says how several clients are computed: ``"vmap"`` all at once, ``"loop"`` one
    after the other (for layers that vmap cannot do, or does slowly). By default it is the
    module's attribute ``batching``, or else ``"vmap"``.

    A module that knows its gradient in closed form can have the method
    ``analytic_loss_and_gradient``, with arguments and result of ``loss_and_gradient``: it is then
    used in place of automatic differentiation, unless it returns None. One that knows a whole
    descent can have
    ``analytic_descent(start [d], x, y, weights, steps, learning_rate, weight_decay, out)``, which
    writes into ``out`` [B, d] the parameters after that many steps on the same batch, each along
    its gradient plus weight_decay · w, and returns the sums of the losses before the steps [B]; or
    None where step after step is less work.
    """

    def __init__(
        self, module: nn.Module, example_loss: ExampleLoss, batching: str | None = None
    ) -> None:
        self.batching = batching or str(getattr(module, "batching", "vmap"))
        if self.batching not in BATCHINGS:
            raise ValueError(
                f"batching is {self.batching!r}: allowed are {' and '.join(BATCHINGS)}"
            )
        self.module = module.eval()
        self.example_loss = example_loss
        trainable = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.is_floating_point()
        }
        self.names = tuple(trainable)
        self.shapes = tuple(tuple(parameter.shape) for parameter in trainable.values())
        self.dtypes = tuple(parameter.dtype for parameter in trainable.values())
        self._sizes = [math.prod(shape) for shape in self.shapes]
        self.dimension = sum(self._sizes)
        if self.dimension == 0:
            raise ValueError("the module has 0 trainable parameters: it needs at least 1")
        self._batched_gradient = vmap(grad_and_value(self._weighted_loss))
        self._analytic: LossAndGradient | None = getattr(module, "analytic_loss_and_gradient", None)
        self._descent: Descent | None = getattr(module, "analytic_descent", None)

    def copy(self) -> "FlatModel":
        """The same function with a module of its own, for another thread or device."""
        return FlatModel(copy.deepcopy(self.module), self.example_loss, self.batching)

    def forgetting(self) -> "FlatModel":
        """The same function that remembers nothing of what was computed before it: a copy where
        the module is somebody's own, whose forward may change the module; else itself."""
        package = type(self.module).__module__.partition(".")[0]
        return self if package == __name__.partition(".")[0] else self.copy()

    def holding(self, state_dict: Mapping[str, Tensor]) -> "FlatModel":
        """The same function, which remembers nothing, with the buffers of a state_dict."""
        buffers = dict(self.module.named_buffers())
        if not buffers:
            return self.forgetting()
        copied = self.copy()
        found = {name: state_dict[name] for name in buffers if name in state_dict}
        copied.module.load_state_dict(found, strict=False)
        return copied

    def at(self, params: Tensor) -> nn.Module:
        """A copy of the module, in evaluation mode, with w = ``params`` [d]."""
        module: nn.Module = copy.deepcopy(self.module)
        views = self.unflatten(params)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in views:
                    parameter.copy_(views[name])
        return module

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are, and what it is given must be."""
        return next(self.module.parameters()).device

    def compiled(self) -> "FlatModel":
        """The same function for a process that takes so many steps that seconds of compiling pay.

        A copy whose module has its attribute ``compiled`` set; itself where it has none.
        """
        if not hasattr(self.module, "compiled"):
            return self
        model = self.copy()
        setattr(model.module, "compiled", True)  # noqa: B010 (no attribute of every module)
        return model

    def on(self, device: torch.device) -> "FlatModel":
        """The same function on ``device``: itself where it is there, else a copy."""
        if device == self.device:
            return self
        moved = self.copy()
        moved.module.to(device)
        return moved

    def flatten(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        """The vector [d] of a state_dict, a copy; its entries that are not part of w are ignored.

        Raises ValueError where a parameter is missing or has another shape.
        """
        parts = []
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in state_dict:
                raise ValueError(f"parameter {name!r} is missing from the state")
            if tuple(state_dict[name].shape) != shape:
                raise ValueError(
                    f"parameter {name!r} has shape {tuple(state_dict[name].shape)}: "
                    f"allowed is {shape}"
                )
            parts.append(state_dict[name].detach().reshape(-1))
        return torch.cat(parts)

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector [d] (or of many, [..., d]) by parameter name, [..., *shape].

        Raises ValueError for a vector of another length.
        """
        if vector.shape[-1:] != (self.dimension,):
            raise ValueError(
                f"the vector has shape {tuple(vector.shape)}: its length must be {self.dimension}"
            )
        leading = vector.shape[:-1]
        return {
            name: part.view((*leading, *shape))
            for name, shape, part in zip(
                self.names, self.shapes, vector.split(self._sizes, dim=-1), strict=True
            )
        }

    def outputs(self, params: Tensor, x: Tensor) -> Tensor:
        """The module's outputs [n, ...] at w = ``params`` [d] for inputs x [n, ...]."""
        return self._call(self.unflatten(params), self._as_input(x, params.dtype))

    def loss_and_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted losses [B] and their gradients [B, d] for B clients at once:

            L_b = Σ_j weights[b, j] · l(outputs(params[b], x[b, j]), y[b, j])

        ``params`` [B, d], ``x`` [B, n, ...], ``y`` [B, n, ...], ``weights`` [B, n], which sum to
        1 for each client; padding has weight 0. No client's result depends on another's.
        """
        x = self._as_input(x, params.dtype)
        known = None if self._analytic is None else self._analytic(params, x, y, weights)
        if known is not None:
            return known
        if len(params) > 1 and self.batching == "vmap":
            views, losses = self._batched_gradient(self.unflatten(params), x, y, weights)
            return losses, torch.cat(
                [view.reshape(len(params), -1) for view in views.values()], dim=1
            )
        losses, gradients = params.new_empty(len(params)), torch.empty_like(params)
        for client in range(len(params)):
            losses[client], gradients[client] = self._client_gradient(
                params[client], x[client], y[client], weights[client]
            )
        return losses, gradients

    def descent(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        steps: int,
        learning_rate: float,
        weight_decay: float,
        out: Tensor,
    ) -> Tensor | None:
        """The module's ``analytic_descent``; None where it has none."""
        if self._descent is None:
            return None
        x = self._as_input(x, start.dtype)
        return self._descent(start, x, y, weights, steps, learning_rate, weight_decay, out)

    def _client_gradient(
        self, params: Tensor, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        counted = weights != 0
        if not counted.all():
            x, y, weights = x[counted], y[counted], weights[counted]
        with torch.enable_grad():
            views = {
                name: view.detach().requires_grad_()
                for name, view in self.unflatten(params).items()
            }
            loss = self._weighted_loss(views, x, y, weights)
            parts = torch.autograd.grad(loss, list(views.values()), materialize_grads=True)
        return loss.detach(), torch.cat([part.reshape(-1) for part in parts])

    def _weighted_loss(
        self, views: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor
    ) -> Tensor:
        return torch.dot(weights, self.example_loss(self._call(views, x), y))

    def _call(self, views: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.module, views, (x,))
        return outputs

    @staticmethod
    def _as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
        # Integer inputs are tokens, and stay so.
        return x.to(dtype) if x.is_floating_point() else x

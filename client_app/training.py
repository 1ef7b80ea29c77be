"""Local training: K steps of SGD on one client, or on a batch of clients at once."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from blackthorn.randomness import Stream, generator_of
from blackthorn.strategies.local_rule import LocalSGD, LocalSteps
from blackthorn.tasks.flat_model import FlatModel
from blackthorn.tasks.shards import ExampleShard, Shard

# What the batch and the parameters of the clients trained together may take, in bytes.
_CHUNK_BYTES = 24 * 2**20


def training_device(name: str) -> torch.device:
    """The device of the configuration's key ``device``: "auto", "cpu" or "cuda".

    Raises ValueError for "cuda" where PyTorch finds no CUDA device.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError(
            "device = cuda is not allowed on this machine: PyTorch finds no CUDA device; use auto "
            "or cpu"
        )
    # With its index, as tensors have it.
    return torch.device("cuda", 0) if found and name != "cpu" else torch.device("cpu")


def client_generator(seed: int, server_round: int, client_id: int) -> np.random.Generator:
    """The generator of client ``client_id`` in round ``server_round``: the same in every process
    and on every machine, whoever else takes part."""
    return generator_of(Stream.BATCHES, seed, server_round, client_id)


def own_code_seed(seed: int, server_round: int, client_id: int) -> int:
    """With what the global generators begin, from which own code draws, where client ``client_id``
    is trained on its own in round ``server_round``; below 2^32."""
    return int(generator_of(Stream.OWN_MODEL, seed, server_round, client_id).integers(2**32))


class ClientGenerators(Sequence[np.random.Generator]):
    """``client_generator`` of each (seed, server_round, client_id), made when it is first asked
    for: where every batch is all of a client's examples nobody draws, and 600 take 8 ms to make."""

    def __init__(self, keys: Iterable[tuple[int, int, int]]) -> None:
        self._keys = list(keys)
        self._made: dict[int, np.random.Generator] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, position: Any) -> Any:
        if position not in self._made:
            self._made[position] = client_generator(*self._keys[position])
        return self._made[position]


def train_clients(
    model: FlatModel,
    start: Tensor,
    shards: Sequence[Shard],
    spec: LocalSteps,
    generators: Sequence[np.random.Generator],
    *,
    chunk_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Train B clients from w = ``start`` [d] (or each from its own, [B, d]), each on its shard
    and with its generator: K times the gradient of L_i(w; batch), and what ``spec`` makes of it.

    Returns their models [B, d] and the means of the losses L_i over the K steps [B], both in
    the dtype of ``start`` and on the processor; the steps are made where ``model`` is. To
    rounding, a client's result is the one it would get alone.

    Memory is that of ``chunk_size`` clients; by default so many as fit into the processor's
    caches. Raises ValueError where shards and generators differ in number, or for a negative
    chunk size.
    """
    if len(shards) != len(generators):
        raise ValueError(f"{len(shards)} shards and {len(generators)} generators: one each")
    if chunk_size < 0:
        raise ValueError(f"chunk_size is {chunk_size}: it must be 0 (chosen here) or more")
    params = start.new_empty(len(shards), start.shape[-1])
    losses = start.new_empty(len(shards))
    # Clients of like size go together, so that little is padded.
    order = sorted(range(len(shards)), key=lambda i: shards[i].num_examples)

    def train(own_model: FlatModel, chunk: list[int]) -> None:
        index = torch.tensor(chunk)
        # Clients side by side are trained in their rows of the result.
        adjacent = chunk == list(range(chunk[0], chunk[0] + len(chunk)))
        rows = slice(chunk[0], chunk[0] + len(chunk))
        own = params[rows] if adjacent else params.new_empty(len(chunk), params.shape[1])
        own_starts = start if start.ndim == 1 else start.index_select(0, index)
        own_shards = [shards[i] for i in chunk]
        losses[index] = _train_chunk(
            own_model, own_starts, own, own_shards, spec, generators, chunk
        )
        if not adjacent:
            params.index_copy_(0, index, own)

    chunks = list(_chunks(order, chunk_size, model, shards, spec))
    # Only LocalSGD is known to keep nothing between its steps. A GPU is busy with one chunk.
    if _is_sgd(spec) and model.device.type == "cpu":
        _in_threads(train, model, chunks)
    else:
        for chunk in chunks:
            train(model, chunk)
    return params, losses


def _in_threads(
    train: Callable[[FlatModel, list[int]], None], model: FlatModel, chunks: list[list[int]]
) -> None:
    """Train the chunks in as many threads as PyTorch may use, each with a single-threaded copy.

    A step's products are too small to be shared: threads that wait for each other at every one of
    them gain little on a quiet machine, and where others used its two cores a round took up to
    fifty times as long.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(chunks))
    if workers < 2:
        for chunk in chunks:
            train(model, chunk)
        return
    # A module cannot be called with two sets of parameters at the same time.
    models = [model.copy() for _ in range(workers)]
    # Whoever is ready takes the next, the largest first: cores that others use are slower.
    pending = reversed(chunks)

    def work(own_model: FlatModel) -> None:
        torch.set_num_threads(1)
        for chunk in pending:
            train(own_model, chunk)

    try:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, models))
    finally:
        # A part of this setting is the whole process's.
        torch.set_num_threads(threads)


def _chunks(
    order: Sequence[int],
    chunk_size: int,
    model: FlatModel,
    shards: Sequence[Shard],
    spec: LocalSteps,
) -> Iterator[list[int]]:
    """Parts the clients, given by ascending size, into groups that are trained together."""
    if chunk_size == 0 and model.batching == "loop":
        chunk_size = 1
    numbers_per_example = shards[0].example[0].numel() if shards else 0
    chunk: list[int] = []
    for client in order:
        # The batch, the model, its gradient, and one more of the kind for the arithmetic.
        numbers = _rows(shards[client], spec) * numbers_per_example + 3 * model.dimension
        taken = 4 * (len(chunk) + 1) * numbers
        if chunk and (len(chunk) == chunk_size if chunk_size else taken > _CHUNK_BYTES):
            yield chunk
            chunk = []
        chunk.append(client)
    if chunk:
        yield chunk


def _is_sgd(spec: LocalSteps) -> TypeGuard[LocalSGD]:
    """Whether the steps are SGD's: not where a subclass may make others."""
    return type(spec) is LocalSGD


def _rows(shard: Shard, spec: LocalSteps) -> int:
    return min(spec.batch_size or shard.num_examples, shard.num_examples)


def _train_chunk(
    model: FlatModel,
    start: Tensor,
    params: Tensor,
    shards: Sequence[Shard],
    spec: LocalSteps,
    generators: Sequence[np.random.Generator],
    clients: Sequence[int],
) -> Tensor:
    """Train from ``start`` [d] or [B, d] into ``params`` [B, d]; returns the mean losses [B]."""
    device = model.device
    start = start.to(device)
    whole = all(_rows(shard, spec) == shard.num_examples for shard in shards)
    batches: Iterator[tuple[Tensor, Tensor, Tensor]] = (
        (x.to(device), y.to(device), weights.to(device))
        for x, y, weights in _batches(shards, spec, generators, clients, params.dtype)
    )
    if whole and start.ndim == 1 and _is_sgd(spec) and not spec.rule.changes_gradients:
        batch = next(batches)
        out = params if device.type == "cpu" else torch.empty_like(params, device=device)
        total = model.descent(
            start, *batch, spec.steps, spec.learning_rate, spec.weight_decay, out=out
        )
        if total is not None:
            if out is not params:
                params.copy_(out)
            return total.cpu() / spec.steps
        batches = itertools.chain([batch], batches)
    # Not in `params` itself: autograd sees all changes of one matrix, by other threads too.
    moving = torch.empty_like(params, device=device).copy_(start)
    total = moving.new_zeros(len(shards))
    for step, (x, y, weights) in enumerate(batches):
        losses, gradients = model.loss_and_gradient(moving, x, y, weights)
        spec.move(moving, gradients, step, clients, start)
        total += losses
    params.copy_(moving)
    return total.cpu() / spec.steps


def _batches(
    shards: Sequence[Shard],
    spec: LocalSteps,
    generators: Sequence[np.random.Generator],
    clients: Sequence[int],
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The K batches of all clients: x [B, n, ...], y [B, n, ...] and weights [B, n], padded to
    the largest client. The tensors are filled anew for the next batch."""
    counts = [_rows(shard, spec) for shard in shards]
    weights = torch.zeros(len(shards), max(counts), dtype=dtype)
    for client, n in enumerate(counts):
        weights[client, :n] = 1 / n
    joint = getattr(shards[0], "joint_batches", None)
    if joint is not None and all(shard == shards[0] for shard in shards):
        for x, y in joint([generators[i] for i in clients], spec.batch_size, spec.steps):
            yield x, y, weights
        return
    all_of_them = all(n == shard.num_examples for n, shard in zip(counts, shards, strict=True))
    x, y = (one.new_empty(*weights.shape, *one.shape) for one in shards[0].example)
    fill = _one_gather(shards, spec, generators, clients) or _shard_by_shard(
        shards, spec, [generators[i] for i in clients]
    )
    for step in range(spec.steps):
        # Where every client uses all it has, the first batch serves for every step.
        if step == 0 or not all_of_them:
            fill(x, y)
        yield x, y, weights


Fill = Callable[[Tensor, Tensor], None]


def _one_gather(
    shards: Sequence[Shard],
    spec: LocalSteps,
    generators: Sequence[np.random.Generator],
    clients: Sequence[int],
) -> Fill | None:
    """Fills a step's batches by one copy out of the data set; None unless all share one."""
    parts = [shard for shard in shards if isinstance(shard, ExampleShard)]
    data_set = parts[0].data_set if parts else None
    if data_set is None or any(part.data_set is not data_set for part in parts):
        return None
    if len(parts) < len(shards):
        return None

    def fill(x: Tensor, y: Tensor) -> None:
        rows = np.empty(y.shape[:2], dtype=np.int64)
        for own, part, client in zip(rows, parts, clients, strict=True):
            size = spec.batch_size
            drawn = part.rows(generators[client], size) if part.draws(size) else part.all_rows
            own[: len(drawn)] = drawn
            own[len(drawn) :] = drawn[0]  # the padding: see _pad
        index = torch.from_numpy(rows.reshape(-1))
        torch.index_select(data_set.x, 0, index, out=x.flatten(0, 1))
        torch.index_select(data_set.y, 0, index, out=y.flatten(0, 1))

    return fill


def _shard_by_shard(
    shards: Sequence[Shard], spec: LocalSteps, generators: Sequence[np.random.Generator]
) -> Fill:
    streams = [
        iter(shard.batches(generator, spec.batch_size, spec.steps))
        for shard, generator in zip(shards, generators, strict=True)
    ]

    def fill(x: Tensor, y: Tensor) -> None:
        own_x, own_y = zip(*map(next, streams), strict=True)
        _pad(x, own_x)
        _pad(y, own_y)

    return fill


def _pad(rows: Tensor, parts: tuple[Tensor, ...]) -> None:
    """Each client's part [n_i, ...] into its rows [B, n, ...], n_i <= n."""
    if all(part.shape[0] == rows.shape[1] for part in parts):
        torch.stack(parts, out=rows)
        return
    for own, part in zip(rows, parts, strict=True):
        own[: part.shape[0]] = part
        # Padded with an example of the client's own: weight 0 times a finite loss is 0.
        own[part.shape[0] :] = part[0]

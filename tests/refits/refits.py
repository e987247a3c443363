"""What runs in a process that holds loaded models: refits of them, bucket by bucket, and what these leave.

A server gives every bucket to its target and to its draft; so does this.
"""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import jobs
import poison

ON_TWO_CPUS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@dataclass(frozen=True)
class Server:
    """Models to hold. draft: whether the draft as well; arguments, flags: as of `jobs.Load`."""

    model: str
    draft: bool = False
    arguments: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refit:
    """A session that brings the values of a checkpoint with native names.

    buckets: how many, in one of many orders and splits (seed). dialect: the spelling of its names. scales: how E8M0
    scales are spelled: "stored", "bytes" or "values". names: what to bring, all of it unless given. removed: how many
    halves of weights come only after the first `end`. stream: whether a bucket is a generator whose tensors are valid
    for one step; else it is a list, and its tensors are overwritten when the call is over.
    """

    model: str
    buckets: int = 1
    seed: int = 0
    dialect: str = "native"
    scales: str = "stored"
    names: tuple[str, ...] = ()
    removed: int = 0
    stream: bool = False


@dataclass(frozen=True)
class Refitted:
    """What a refit left, for each model that is held.

    digests: of its parameters. removed: native names of its own that were held back. named: what its first `end` said
    is still to come, in lines; None where it ended. open: whether its session was open after that. moved: parameters
    and buffers that have another address than before. said: the lines of the `end` that ended it. buckets: how many
    calls it got.
    """

    digests: dict[str, str]
    removed: list[str]
    named: list[str] | None
    open: bool
    moved: list[str]
    said: list[str]
    buckets: int


_held: list[tuple[ExitStack, list[Any]]] = []


def fresh(server: Server) -> list[dict[str, str]]:
    """The digests of each model of a server that starts on its checkpoint."""
    from sglang_dsv4.models.loading.rank import digests

    with ExitStack() as stack:
        return [digests(model) for model in models_of(server, stack)]


def hold(server: Server) -> None:
    """Load the models of a server and keep them; `release` lets them go."""
    with ExitStack() as stack:
        models = models_of(server, stack)
        _held.append((stack.pop_all(), models))


def release() -> None:
    stack, _ = _held.pop()
    stack.close()


def models_of(server: Server, stack: ExitStack, tp_rank: int = 0, port: int | None = None) -> list[Any]:
    """The target, and the draft if there is to be one, while `stack` is open."""
    from sglang_dsv4.models.loading.rank import Place, load_model, parallel_context, server_arguments

    stack.enter_context(patch.dict(os.environ, server.flags))
    arguments = [*server_arguments(server.model, log_level="error"), *server.arguments]
    resolved = stack.enter_context(parallel_context(arguments, Place(tp_rank), meeting_port=port))
    return [load_model(resolved, draft=draft) for draft in ((False, True) if server.draft else (False,))]


def refit(wanted: Refit) -> list[Refitted]:
    """Refit the models that are held last."""
    return refitted(wanted, _held[-1][1])


def refitted(wanted: Refit, models: Sequence[Any]) -> list[Refitted]:
    """One session: begin, buckets, an end that may be too early, what was held back, the end."""
    buckets, removed = split(wanted)
    before = [addresses(model) for model in models]
    for model in models:
        model.loader_state.begin()
    for bucket in buckets:
        give(bucket, models, stream=wanted.stream)
    first = [early_end(model) for model in models]
    if removed:
        give(spelled(removed, wanted), models, stream=wanted.stream)
    return [
        left(model, first[number], before[number], list(removed), len(buckets)) for number, model in enumerate(models)
    ]


def split(wanted: Refit) -> tuple[list[list[tuple[str, Any]]], dict[str, Any]]:
    """The buckets, by the names that they are sent under, and the halves that are held back, by native name."""
    rng = random.Random(wanted.seed)
    tensors = dict(jobs.tensors_of(wanted.model, wanted.names))
    modules = sorted(name.removesuffix(".scale") for name in tensors if name.endswith(".scale"))
    pairs = [module for module in modules if f"{module}.weight" in tensors]
    chosen = rng.sample(pairs, min(wanted.removed, len(pairs)))
    removed = {name: tensors.pop(name) for name in (f"{module}.{rng.choice(('weight', 'scale'))}" for module in chosen)}
    names = sorted(tensors)
    rng.shuffle(names)
    cuts = [0, *sorted(rng.randint(0, len(names)) for _ in range(wanted.buckets - 1)), len(names)]
    parts = [names[start:stop] for start, stop in pairwise(cuts)]
    return [spelled({name: tensors[name] for name in part}, wanted) for part in parts], removed


def spelled(tensors: Mapping[str, Any], wanted: Refit) -> list[tuple[str, Any]]:
    """Tensors as a trainer sends them: names of a dialect, scales of a kind."""
    from sglang_dsv4.checkpoint.dialects import DIALECTS

    rename = DIALECTS[wanted.dialect].from_native
    return [(rename(name), SPELLINGS[wanted.scales](tensor)) for name, tensor in tensors.items()]


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor


def _values(tensor: Any) -> Any:
    import torch

    return tensor.float() if tensor.dtype == torch.float8_e8m0fnu else tensor


SPELLINGS: dict[str, Callable[[Any], Any]] = {"stored": lambda tensor: tensor, "bytes": _bytes, "values": _values}


def give(bucket: list[tuple[str, Any]], models: Sequence[Any], *, stream: bool) -> None:
    """A bucket to every model. Nothing of it can be read when the call is over."""
    import torch

    for model in models:
        if stream:
            model.load_weights(poison.poisoned(bucket) if bucket else iter(()))
            continue
        sent = [(name, tensor.clone()) for name, tensor in bucket]
        model.load_weights(sent)
        for _, tensor in sent:
            tensor.reshape(-1).view(torch.uint8).fill_(poison.POISON)


def early_end(model: Any) -> tuple[list[str] | None, bool, list[str]]:
    """`end` when something may be lacking: what it named, whether the session is open, what it said if it ended."""
    from sglang_dsv4.errors import UnmatchedPairError

    try:
        said = model.loader_state.end()
    except UnmatchedPairError as error:
        return [error.found, *error.details], model.loader_state.session is not None, []
    return None, model.loader_state.session is not None, said


def left(
    model: Any,
    first: tuple[list[str] | None, bool, list[str]],
    before: dict[str, int],
    removed: list[str],
    buckets: int,
) -> Refitted:
    from sglang_dsv4.models.loading.rank import digests

    named, is_open, said = first
    if is_open:
        said = model.loader_state.end()
    after = addresses(model)
    draft = model.loader_state.wiring.kind != "target"
    return Refitted(
        digests(model),
        sorted(name for name in removed if name.startswith("mtp.") == draft),
        named,
        is_open,
        [name for name in before if after[name] != before[name]],
        said,
        buckets,
    )


def addresses(model: Any) -> dict[str, int]:
    """Where each parameter and buffer lies: a captured CUDA graph reads there, whatever happens."""
    return {name: value.data_ptr() for name, value in [*model.named_parameters(), *model.named_buffers()]}


# --- ranks of a server, each in a process of its own ------------------------------------------------------------------


def fresh_rank(server: Server, rank: int, port: int) -> list[dict[str, str]]:
    """`fresh` for one of several ranks, which meet at a port."""
    from sglang_dsv4.models.loading.rank import digests

    with ExitStack() as stack:
        return [digests(model) for model in models_of(server, stack, rank, port)]


def refit_rank(server: Server, rank: int, port: int, wanted: Sequence[Refit]) -> list[list[Refitted]]:
    """One rank of a server that is refitted again and again."""
    with ExitStack() as stack:
        models = models_of(server, stack, rank, port)
        return [refitted(one, models) for one in wanted]

"""One rank of one model, built and loaded in this process through SGLang's own loader, without a server.

`sglang-dsv4 load` runs a rank of many alone, on torch's "fake" process group: its collectives do nothing, which is all
that building a model asks of them. Tests bring up the real groups, each rank in a process of its own.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import compat

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Place:
    """Which rank: of tensor parallelism within a stage, and which pipeline stage."""

    tp_rank: int = 0
    pp_rank: int = 0


FIRST = Place()


@contextmanager
def parallel_context(
    arguments: Sequence[str], place: Place = FIRST, *, meeting_port: int | None = None
) -> Iterator[Any]:
    """Resolve server arguments as the server would, then bring up the parallel state of one rank.

    arguments: as for `python -m sglang.launch_server`. meeting_port: where the ranks find each other on 127.0.0.1, each
    in a process of its own; None for a rank of many that is alone. Yields SGLang's ServerArgs. The parallel state goes
    away at the end.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(list(arguments))
    world_rank = spawn_world_rank(server_args, tp_rank=place.tp_rank, pp_rank=place.pp_rank)
    alone = meeting_port is None
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=0 if alone else world_rank))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    with ExitStack() as stack:
        if alone and server_args.tp_size * server_args.pp_size > 1:
            stack.enter_context(_without_peers())
        port = meeting_port or _free_port()
        bootstrap.init_parallel_runtime(server_args=server_args, device=_device(), dist_port=port)
        stack.callback(parallel_state.destroy_distributed_environment)
        stack.callback(parallel_state.destroy_model_parallel)
        yield server_args


def load_model(server_args: Any, *, draft: bool = False, load_format: str | None = None) -> torch.nn.Module:
    """Build and load the target, or the draft, that these arguments describe; post-processing included."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe.utils import draft_model_build_scope
    from sglang.srt.model_loader import get_model_loader

    path = server_args.speculative_draft_model_path if draft else None
    model_config = ModelConfig.from_server_args(server_args, model_path=path, is_draft_model=draft)
    bootstrap.init_layer_runtime(model_config=model_config)
    load_config = LoadConfig(
        load_format=load_format or resolving_view(server_args).load_format,
        model_loader_extra_config=server_args.model_loader_extra_config,
        download_dir=server_args.download_dir,
        tp_rank=0,
    )
    with ExitStack() as stack:
        if draft:
            stack.enter_context(draft_model_build_scope())
        loader = get_model_loader(load_config=load_config, model_config=model_config)
        return loader.load_model(model_config=model_config, device_config=DeviceConfig(_device(), 0))


def server_arguments(model: str, *, model_impl: str = compat.MODEL_IMPL, **options: str | int | None) -> list[str]:
    """Command-line arguments of a server that loads `model` with our implementation; None leaves an option out."""
    arguments = ["--model-path", model, "--model-impl", model_impl]
    for name, value in options.items():
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def digests(model: torch.nn.Module) -> dict[str, str]:
    """{parameter name: sha256 of its bytes}, as they are after SGLang's post-processing.

    Parameters of our classes that a load may leave unwritten are left out: they may hold what the memory held before.
    """
    import torch

    from sglang_dsv4.models.loading.proof import may_stay_unwritten

    def digest(tensor: torch.Tensor) -> str:
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        return hashlib.sha256(data.numpy().data).hexdigest()

    state: Any = getattr(model, "loader_state", None)
    return {
        name: digest(value)
        for name, value in sorted(model.named_parameters())
        if state is None or not may_stay_unwritten(name, state.wiring, state.known.own)
    }


def _device() -> str:
    from sglang.srt.utils.common import get_device

    return get_device()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _without_peers() -> Iterator[None]:
    """Make every process group a fake one for the time of the load."""
    import torch.distributed
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
    from torch.testing._internal.distributed import fake_pg  # importing it registers the backend

    new_group = torch.distributed.new_group
    init = torch.distributed.init_process_group

    def fake_init(*args: Any, **kwargs: Any) -> Any:
        kept = {key: kwargs[key] for key in ("world_size", "rank") if key in kwargs}
        return init(backend="fake", store=fake_pg.FakeStore(), **kept)

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    def no_queue(*args: Any, **kwargs: Any) -> None:
        return None

    with (
        _swapped(torch.distributed, "init_process_group", fake_init),
        _swapped(torch.distributed, "new_group", fake_group),
        _swapped(MessageQueue, "create_from_process_group", no_queue),
    ):
        yield


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

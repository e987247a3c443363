"""What a rank of a load does: real gloo groups through SGLang's own bootstrap, then the package's loader.

Runs in ranks that node.py forked, never in the process that runs pytest; what it returns travels by pickle.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from node import Task, free_port

NEXTN = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1")
"""Arguments of a server with the NextN draft. (DSpark is refused on a CPU by SGLang; its draft loads without any.)"""

Around = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a rank loads; picklable, so a function of a module, or a partial of one."""


@dataclass(frozen=True)
class Parameter:
    """A parameter as a rank holds it. bits: its bytes as unsigned integers of the dtype's size, in its shape."""

    dtype: str
    bits: np.ndarray


@dataclass(frozen=True)
class Part:
    """What a rank holds of one model, and what its load says of itself.

    digests: as of `load --digests`. kept: name -> parameter, of those asked for. report: as of `load --json`.
    """

    digests: dict[str, str]
    kept: dict[str, Parameter]
    report: dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One rank's load.

    arguments: of the server, the parallel ones among them. parts: which models, one after the other as a server loads
    them: "target", "draft". flags: environment. keep: the parameters to return, an expression for their names. around:
    contexts that the loads run in.
    """

    model: str
    arguments: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("target",)
    flags: Mapping[str, str] = field(default_factory=dict)
    keep: str = ""
    around: tuple[Around, ...] = ()
    model_impl: str = "sglang_dsv4"  # "auto": SGLang's own classes


def world(load: Load, ranks: int, others: Mapping[int, Load] | None = None) -> list[Task]:
    """The tasks of a server's ranks. others: what single ranks do instead."""
    port = free_port()
    loads = [(others or {}).get(rank, load) for rank in range(ranks)]
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % 2) for rank in range(ranks))}
    return [
        Task(load_parts, (replace(mine, flags={}), rank, port), bind | dict(mine.flags))
        for rank, mine in enumerate(loads)
    ]


def load_parts(load: Load, rank: int, port: int) -> dict[str, Part]:
    """Join the world as `rank` by SGLang's own bootstrap, load what is asked; part -> what this rank then holds."""
    from sglang_dsv4.models.loading.rank import Place, load_model, parallel_context, server_arguments

    arguments = [*server_arguments(load.model, model_impl=load.model_impl, log_level="info"), *load.arguments]
    pp_rank, tp_rank = divmod(rank, width_of(load.arguments))
    with ExitStack() as stack:
        for around in load.around:
            stack.enter_context(around())
        server_args = stack.enter_context(parallel_context(arguments, Place(tp_rank, pp_rank), meeting_port=port))
        return {part: held(load_model(server_args, draft=part == "draft"), load.keep) for part in load.parts}


def width_of(arguments: Sequence[str]) -> int:
    """Ranks of one pipeline stage: what --tp-size says."""
    return int(arguments[arguments.index("--tp-size") + 1]) if "--tp-size" in arguments else 1


def held(model: Any, keep: str) -> Part:
    from sglang_dsv4.models.loading.rank import digests

    kept = {name: parameter(value) for name, value in model.named_parameters() if keep and re.search(keep, name)}
    report = model.loader_state.report.as_json() if hasattr(model, "loader_state") else {}
    return Part(digests(model), kept, report)


def parameter(tensor: Any) -> Parameter:
    import torch

    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    data = tensor.detach().contiguous()
    return Parameter(str(data.dtype).removeprefix("torch."), data.view(unsigned).numpy().copy())


def streamer_version() -> str:
    """Of the RunAI streamer that this process imports."""
    from importlib.metadata import distributions

    import runai_model_streamer

    home = str(Path(runai_model_streamer.__file__).parents[1])
    return next(d.version for d in distributions(path=[home]) if d.metadata["Name"] == "runai-model-streamer")


def warm_up() -> None:
    """What a server's processes do before a load, done once for all ranks: imports, hooks, compiled kernels.

    Compiling starts no thread; running a kernel would.
    """
    from sglang_dsv4 import envs, plugin
    from sglang_dsv4.models import deepseek_v4, deepseek_v4_dspark, deepseek_v4_nextn  # noqa: F401
    from sglang_dsv4.models.loading import rank  # noqa: F401
    from sglang_dsv4.numerics import backend

    plugin.engage()
    del os.environ[envs.ENGAGED.name]  # each rank is asked for itself
    backend.warm_up()

"""What runs in a loading process: SGLang is imported once there, and many loads share it."""

import atexit
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

NEXTN = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1")
"""Arguments of a server with the NextN draft. (DSpark is refused on a CPU by SGLang; its draft loads without any.)"""

FUSED = ("--enforce-shared-experts-fusion",)


@dataclass(frozen=True)
class Load:
    """One load: which checkpoint, as which rank, and how. `flags` are environment flags read at each load."""

    model: str
    draft: bool = False
    arguments: tuple[str, ...] = ()
    flags: dict[str, str] = field(default_factory=dict)
    tp_rank: int = 0
    pp_rank: int = 0
    poison: str = ""  # read through the poisoning streamer, in this order (poison.ORDERS)
    keep: str = ""  # return the parameters whose names match this expression
    model_impl: str = "sglang_dsv4"  # "auto": SGLang's own classes


@dataclass(frozen=True)
class Loaded:
    """What a load did.

    digests: {parameter: sha256}. report: as of `load --json`. kept: name -> array (see `Load.keep`). kernel_read: bytes
    that read and pread brought into this process; what is mapped does not count.
    """

    digests: dict[str, str]
    report: dict[str, Any]
    kept: dict[str, np.ndarray]
    kernel_read: int = 0


def start(wo_a_fp8: str, extra_path: str) -> None:
    """Initialise a loading process, before SGLang is imported."""
    atexit.register(os._exit, 0)  # runs last: taking SGLang's modules apart takes seconds
    os.environ |= {"SGLANG_PLATFORM": "dsv4_cpu", "SGLANG_OPT_FP8_WO_A_GEMM": wo_a_fp8, "OMP_NUM_THREADS": "1"}
    if extra_path:
        sys.path.insert(0, extra_path)
    import dsv4_cpu_platform
    import torch

    dsv4_cpu_platform.activate()  # its flags belong to the process; those of a job go with the job
    torch.set_num_threads(1)


def load(job: Load) -> Loaded:
    """One complete load in this process."""
    before = kernel_read()
    with loaded(job) as model:
        return replace(result(model, job.keep), kernel_read=kernel_read() - before)


def kernel_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


@dataclass(frozen=True)
class Said:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def command(arguments: Sequence[str], flags: dict[str, str]) -> Said:
    """`sglang-dsv4` with these arguments, in this process."""
    from sglang_dsv4.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, flags), redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Said(code, out.getvalue(), err.getvalue())


@contextmanager
def loaded(job: Load) -> Iterator[Any]:
    """The loaded model of a job, while its parallel state is up."""
    import poison

    from sglang_dsv4.models.loading.rank import Place, load_model, parallel_context, server_arguments

    arguments = [*server_arguments(job.model, model_impl=job.model_impl, log_level="error"), *job.arguments]
    streamer = patch("runai_model_streamer.FileStreamer", poison.streamer(job.poison)) if job.poison else None
    with patch.dict(os.environ, job.flags), parallel_context(arguments, Place(job.tp_rank, job.pp_rank)) as server_args:
        if streamer is None:
            yield load_model(server_args, draft=job.draft)
        else:
            with streamer:
                model = load_model(server_args, draft=job.draft, load_format="runai_streamer")
            yield model


@dataclass(frozen=True)
class Update:
    """Tensors of a checkpoint to write into a loaded model: all of it, or only `names`."""

    model: str
    names: tuple[str, ...] = ()
    order: str = "file"
    postprocess: bool = False  # as SGLang's update from disk does; an update from tensors does not


def updated(job: Load, updates: Sequence[Update]) -> Loaded:
    """A load, then updates of its model one after the other."""
    with loaded(job) as model:
        for update in updates:
            apply(update, model)
        return result(model, job.keep)


def apply(update: Update, model: Any) -> None:
    import poison
    import torch
    from sglang.srt.model_loader.loader import DefaultModelLoader

    stream = poison.poisoned(poison.ORDERS[update.order](tensors_of(update.model, update.names)))
    if update.postprocess:
        DefaultModelLoader.load_weights_and_postprocess(model, stream, torch.device("cpu"))
    else:
        model.load_weights(stream)


def result(model: Any, keep: str = "") -> Loaded:
    from sglang_dsv4.models.loading.rank import digests

    kept = {name: array(value) for name, value in model.named_parameters() if keep and re.search(keep, name)}
    report = model.loader_state.report.as_json() if hasattr(model, "loader_state") else {}
    return Loaded(digests(model), report, kept)


def array(tensor: Any) -> np.ndarray:
    """A parameter as numpy: floats of two or four bytes by value, everything of one byte as uint8."""
    import torch

    tensor = tensor.detach()
    if tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy().copy()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()


def tensors_of(model: str, names: Sequence[str]) -> list[tuple[str, Any]]:
    """(name, torch tensor) of a checkpoint, read whole by safetensors; only `names` unless there are none."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        found |= load_file(path)
    return [(name, found[name]) for name in names or found]

"""One rank's load on a faked device, compared with the file in the process that made it; and which branch it took."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from fake_device import DEVICES, faked
from fake_device_reading import Model, compare
from fake_device_values import Grid

NEXTN = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1")


@dataclass(frozen=True)
class Faked:
    """A load of `model` as one rank.

    runner: --moe-runner-backend. becomes: what SGLang's own resolution would make of it on the device; "" where it does
    so here. flags: environment.
    """

    model: Model
    device: str
    runner: str = "auto"
    becomes: str = ""
    grid: Grid = field(default_factory=Grid)
    flags: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    wo_a_fp8: bool = False
    pp_rank: int = 0


@dataclass(frozen=True)
class Seen:
    """What the rank held and how it came there.

    faults, compared, left: as of `fake_device_reading.Found`. method: the class that allocated the experts. runs: their
    runner. padded: whether FusedMoE read into padded buffers. presharded: whether it was handed this rank's part.
    dtypes: of the experts' weight and scale. width: of one expert in this rank's buffers. slots: experts in them. wo_a:
    the dtype of its weight.
    """

    faults: list[str]
    compared: int
    left: dict[str, str]
    method: str
    runs: str
    padded: bool
    presharded: bool
    dtypes: tuple[str, ...]
    width: int
    slots: int
    wo_a: str


def load(job: Faked) -> Seen:
    """Alone on a fake process group; raises what the load raises."""
    from sglang_dsv4.models.loading.rank import Place, load_model, parallel_context, server_arguments

    grid, device = job.grid, DEVICES[job.device]
    options = {"tp_size": grid.tp, "ep_size": grid.ep, "moe_runner_backend": job.runner}
    arguments = server_arguments(job.model.folder, log_level="error", **options)
    arguments += [*job.arguments, *(NEXTN if job.model.kind == "nextn" else ())]
    flags = job.flags | ({"SGLANG_USE_AITER": "1"} if device.aiter else {})
    with (
        patch.dict(os.environ, flags),
        patch("sglang_dsv4.decisions.resolution.detect_arch", lambda: device.arch),
        parallel_context(arguments, Place(grid.rank, job.pp_rank)) as server_args,
        faked(device, job.becomes, wo_a_fp8=job.wo_a_fp8),
    ):
        model = load_model(server_args, draft=job.model.kind != "target")
        return _seen(job, model)


def load_all(jobs: list[Faked]) -> list[Seen]:
    """Loads one after the other, for one trip to the process."""
    return [load(job) for job in jobs]


PLANTS = ("steps over the ranks before", "another rank's part", "w1 above w3")
"""Faults that `load_planted` knows."""


def load_planted(job: Faked, plant: str) -> Seen:
    """The load with a fault in it: presharded experts written where whole ones would be (as once on every GPU with
    padded buffers), cut for another rank, or laid out for another runner."""
    from sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe import Mxfp4FlashinferCutlassMoEMethod

    from sglang_dsv4.models.loading import writer
    from sglang_dsv4.models.loading.plan import Plan

    cut, taking_sharded = Plan.cut, writer.taking_sharded

    @contextmanager
    def stepping_over(modules: Mapping[str, Any], plan: Plan) -> Iterator[None]:
        with taking_sharded(modules, plan):
            for path, part in plan.expert_parts.items():
                modules[path].moe_tp_rank = part.rank
            yield

    def anothers(self: Plan, name: str, tensor: Any) -> Any:
        others = {path: part._replace(rank=part.of - 1 - part.rank) for path, part in self.expert_parts.items()}
        return cut(replace(self, expert_parts=others), name, tensor)

    exchanged = {
        "steps over the ranks before": (writer, "taking_sharded", stepping_over),
        "another rank's part": (Plan, "cut", anothers),
        "w1 above w3": (Mxfp4FlashinferCutlassMoEMethod, "load_up_proj_weight_first", False),
    }
    with patch.object(*exchanged[plant]):
        return load(job)


def _seen(job: Faked, model: Any) -> Seen:
    found = compare(job.model, job.grid, dict(model.named_parameters()))
    layers = [module for module in model.modules() if hasattr(module, "use_padded_loading")]
    experts = layers[0]
    scale = next(name for name in ("w13_weight_scale_inv", "w13_weight_scale", "w13_weight") if hasattr(experts, name))
    wo_a = next(value for name, value in model.named_parameters() if name.endswith(".wo_a.weight"))
    tensors = (experts.w13_weight, getattr(experts, scale), wo_a)
    weight_dtype, scale_dtype, wo_a_dtype = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return Seen(
        faults=found.faults,
        compared=found.compared,
        left=found.left,
        method=type(experts.quant_method).__name__,
        runs=experts.runner_backend.value,
        padded=experts.use_padded_loading,
        presharded=bool(model.loader_state.plan().expert_parts),
        dtypes=(weight_dtype, scale_dtype),
        width=experts.w13_weight.shape[1] // 2,
        slots=len(experts.w13_weight),
        wo_a=wo_a_dtype,
    )

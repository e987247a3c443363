"""The platform object: what the device is, the argument defaults it needs, and where the forward pass is put in."""

import os
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from dsv4_cpu_platform import NAME

# Defaults for arguments that were not given. Tokens are cheap here: a pool of 8192 costs a few MiB on a tiny model.
# The sliding-window pool is sized for prompts that cross several windows, which the GPU default of 0.1 does not leave.
ARGUMENT_DEFAULTS = {
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "swa_full_tokens_ratio": 0.5,
}
SPECULATIVE_ALGORITHMS = ("EAGLE",)


class Dsv4CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device, declared out of tree so that no GPU or AMX kernel is chosen for it."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """A name, where the in-tree class gives a ``torch.device``: SGLang splits it at the colon."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what was not given; turn off graphs and overlap, which need a device stream."""
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        for name, value in ARGUMENT_DEFAULTS.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)
        server_args.disable_overlap_schedule = True
        config = server_args.cuda_graph_config
        for phase in (Phase.DECODE, Phase.PREFILL):
            config = with_phase(config, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = config
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bind_ranks(ranks, sorted(os.sched_getaffinity(0))))

    def get_default_attention_backend(self) -> str:
        from dsv4_cpu_platform.seams import ATTENTION_BACKEND

        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() in SPECULATIVE_ALGORITHMS

    def init_backend(self) -> None:
        """Called when a worker imports SGLang's model runner, before it builds anything.

        Raises CpuPlatformError where SGLang loaded no plugins, or a list in SGLANG_PLUGINS left this one out.
        """
        from dsv4_cpu_platform import backend, seams
        from dsv4_cpu_platform.gather import CpuPlatformError

        if not seams.declared:
            raise CpuPlatformError(f"the hooks of this platform were not loaded: add {NAME} to SGLANG_PLUGINS")
        backend.install()

    def post_load_model(self, model: Any) -> None:
        """Called in the worker after the load: build the reference model at once, so that a fault shows at start."""
        from dsv4_cpu_platform import forward

        forward.attach(model)


def bind_ranks(ranks: int, cpus: list[int]) -> str:
    """SGLang's binding string: one group of CPUs for each rank, for example ``0|1``; ranks share CPUs if they must."""
    if ranks >= len(cpus):
        groups = [[cpus[rank % len(cpus)]] for rank in range(ranks)]
    else:
        each = len(cpus) // ranks
        groups = [cpus[rank * each : (rank + 1) * each] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)

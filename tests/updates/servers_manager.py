"""SGLang's own manager of updates over loaded models, in this process and without a server.

What stands round the manager in a scheduler is reduced to what the manager asks of it. What is under test is whole: the
manager, the updaters, the models, and our hooks on them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent.parent / "loading"))
import jobs
from jobs import Load


@dataclass
class Managed:
    """The manager and the models by role."""

    manager: Any
    models: dict[str, Any]

    def call(self, name: str, **fields: Any) -> tuple[bool, str]:
        """A call as the scheduler takes it: `begin_weight_update`, ... ; (success, message)."""
        answer = getattr(self.manager, name)(request(**fields))
        return answer.success, answer.message

    def send(self, named: list[tuple[str, Any]], **fields: Any) -> tuple[bool, str]:
        """One bucket of tensors, which no process boundary is between."""
        return self.call("update_weights_from_tensor", serialized_named_tensors=[named], **fields)

    def digests(self) -> dict[str, dict[str, str]]:
        from sglang_dsv4.models.loading.rank import digests

        return {role: digests(model) for role, model in self.models.items()}


def request(**fields: Any) -> SimpleNamespace:
    """The fields that the manager reads of a call, as SGLang defaults them."""
    defaults = {
        "selector": "all",
        "load_format": None,
        "flush_cache": True,
        "torch_empty_cache": False,
        "weight_version": None,
        "recapture_cuda_graph": False,
        "group_name": "group",
    }
    return SimpleNamespace(**defaults | fields)


@contextmanager
def managed(job: Load, *, draft: bool = False, around: Callable[[], Any] | None = None) -> Iterator[Managed]:
    """The manager of a target that this job loads, and of its NextN draft. around: a context for the load."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from sglang_dsv4.models.loading.rank import load_model, parallel_context, server_arguments

    arguments = [*server_arguments(job.model, log_level="error"), *job.arguments, *(jobs.NEXTN if draft else ())]
    with ExitStack() as stack:
        stack.enter_context(patch.dict("os.environ", job.flags))
        server_args = stack.enter_context(parallel_context(arguments))
        if around is not None:
            stack.enter_context(around())
        models = {"target": load_model(server_args)}
        if draft:
            models["draft"] = load_model(server_args, draft=True)
        runners = []
        for role, model in models.items():
            config = ModelConfig.from_server_args(server_args, is_draft_model=role == "draft")
            runner = SimpleNamespace(model=model)
            runner.weight_updater = WeightUpdater(
                tp_rank=0,
                device="cpu",
                gpu_id=0,
                model_config=config,
                custom_weight_loaders={},
                get_model=lambda model=model: model,
                update_model_fields=lambda *_, **__: None,
                recapture_cuda_graph=lambda: None,
                get_model_runner=lambda runner=runner: runner,
            )
            runners.append((role, runner))
        manager = SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(
                weight_update_runners=lambda: runners[:1],
                deserialize_own_rank=lambda payloads: payloads[0],
                model_runner=runners[0][1],
            ),
            draft_worker=SimpleNamespace(weight_update_runners=lambda: runners[1:]) if draft else None,
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=FakeScheduler(),
        )
        yield Managed(manager, models)


class FakeScheduler:
    """In place of the scheduler, which would want a GPU's caches: it notes what it is asked."""

    def __init__(self) -> None:
        self.aborted = False

    def record_weight_version_change(self, *, new_version: str | None) -> None:
        """Nothing serves here."""

    def process_input_requests(self, requests: list[Any]) -> None:
        """Nothing comes here."""

    def abort_request(self, abort: Any) -> None:
        self.aborted = abort.abort_all


class FakeEngine:
    """In place of checkpoint-engine's transport, which lends memory of a GPU to other processes.

    buckets: what its parameter server sends. Each lies in one buffer that is written over when the bucket was taken, as
    the real one's is. connections: how many workers spoke to it. taken: buckets that a worker came back from.
    """

    def __init__(self, buckets: list[list[tuple[str, Any]]], *, ends: bool = True) -> None:
        self.buckets = buckets
        self.ends = ends
        self.connections = 0
        self.taken = 0

    def update_weights_from_ipc(self, _context: Any, _handle: str, *, device_id: int, run: Any, post_hook: Any) -> None:
        self.connections += 1
        for bucket in self.buckets:
            lent = [(name, tensor.clone()) for name, tensor in bucket]
            run(lent)
            for _name, tensor in lent:
                tensor.view(-1).view(dtype_of_bytes()).fill_(0x55)
            self.taken += 1
        if self.ends:
            post_hook()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let SGLang find this in place of the package."""
        package, worker = ModuleType("checkpoint_engine"), ModuleType("checkpoint_engine.worker")
        worker.update_weights_from_ipc = self.update_weights_from_ipc  # type: ignore[attr-defined]
        ours = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"
        modules: Mapping[str, ModuleType] = {"checkpoint_engine": package, "checkpoint_engine.worker": worker}
        with patch.dict(sys.modules, modules):
            sys.modules.pop(ours, None)
            from sglang.srt.checkpoint_engine import checkpoint_engine_worker

            implementation = checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl
            with (
                patch.object(implementation, "get_device_uuid", lambda _: "GPU-fake"),
                patch.object(implementation, "get_device_id", lambda _: 0),
            ):
                yield
            sys.modules.pop(ours, None)


def dtype_of_bytes() -> Any:
    import torch

    return torch.uint8

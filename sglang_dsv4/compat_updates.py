"""The rows of compat's table that live updates need."""

from __future__ import annotations

from typing import Literal

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_LOADER = "sglang.srt.model_loader.loader"
_MODELS = "sglang.srt.models"
_WORKER = "sglang.srt.checkpoint_engine.checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl"

_MESSAGES = "sglang.srt.managers.io_struct"

ANSWERS = {
    "begin": "BeginWeightUpdateReqOutput",
    "end": "EndWeightUpdateReqOutput",
    "tensor": "UpdateWeightsFromTensorReqOutput",
    "distributed": "UpdateWeightsFromDistributedReqOutput",
    "disk": "UpdateWeightFromDiskReqOutput",
    "ipc": "UpdateWeightsFromIPCReqOutput",
}
"""Road of an update -> SGLang's class for the answer."""

_UNTIL = "SGLang judges an update on all ranks before its first write"
_CALLS = "sglang_dsv4.updates.manager"
_RUNNERS = "sglang_dsv4.updates.runners"

Row = tuple[str, tuple[str, ...] | None, str]
"""Target, leading parameters, why."""

USES: tuple[Row, ...] = (
    (f"{_LOADER}.DefaultModelLoader.postprocess_weights", ("model", "target_device"), "ends an update by IPC"),
    ("sglang.srt.layers.quantization.base_config.QuantizeMethodBase", None, "whether a method can undo its work"),
    (f"{_MANAGER}._select_runners", ("self", "selector"), "the models that a call goes to"),
    (f"{_UPDATER}.receive_weights_from_distributed", ("self",), "a broadcast that is refused is received first"),
    *((f"{_MESSAGES}.{name}", None, "the answer to a call") for name in ANSWERS.values()),
)

READS: tuple[Row, ...] = (
    (f"{_MESSAGES}.AbortReq", None, "ends what runs on torn weights"),
    (f"{_MESSAGES}.TokenizedEmbeddingReqInput", None, "which request asks for no tokens"),
    (f"{_MANAGER}._session", None, "whether a session is open, and for which models"),
    (f"{_UPDATER}._model_update_group", None, "the groups that a broadcast may come through"),
    (f"{_SCHEDULER}.process_input_requests", ("self", "recv_reqs"), "taken over while weights are torn"),
    (f"{_SCHEDULER}._tokenized_requests", ("recv_req",), "which requests ask for tokens"),
    (f"{_SCHEDULER}.handle_generate_request", ("self", "recv_req", "mm_input_error"), "answers one with an error"),
    (f"{_SCHEDULER}.handle_embedding_request", ("self", "recv_req", "mm_input_error"), "the same"),
    (f"{_SCHEDULER}.abort_request", ("self", "recv_req"), "ends what runs on torn weights"),
    ("sglang.srt.managers.utils.is_health_check_generate_req", ("recv_req",), "which request is a health check"),
    (f"{_WORKER}.get_model_loader", ("self",), "what takes a bucket of the checkpoint engine"),
    (f"{_WORKER}.get_post_hook", ("self",), "what ends its transfer"),
    (f"{_MODELS}.deepseek_v2.DeepseekV2MoE.mega_shared_l1_weights", None, "a copy of weights that no update reaches"),
)


def _hook(target: str, parameters: tuple[str, ...], why: str, handler: str, until: str = _UNTIL) -> Hook:
    return target, "around", parameters, why, until, handler


Hook = tuple[str, Literal["around"], tuple[str, ...], str, str, str]
"""The fields of a Seam: target, kind, leading parameters, why, until when, handler."""

HOOKS: tuple[Hook, ...] = (
    *(
        _hook(f"{_MANAGER}.{name}", ("self", "recv_req"), "takes a call, and answers it", f"{_CALLS}:{handler}")
        for name, handler in (
            ("begin_weight_update", "begin"),
            ("end_weight_update", "end"),
            ("update_weights_from_disk", "from_disk"),
            ("update_weights_from_tensor", "from_tensor"),
            ("update_weights_from_distributed", "from_distributed"),
            ("update_weights_from_ipc", "from_ipc"),
        )
    ),
    *(
        _hook(f"{_UPDATER}.{name}", ("self", *parameters), "writes one model", f"{_RUNNERS}:{handler}")
        for name, parameters, handler in (
            ("begin_weight_update", (), "begin"),
            ("end_weight_update", ("run_post_load",), "end"),
            (
                "update_weights_from_disk",
                ("model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
                "load_folder",
            ),
            ("update_weights_from_tensor", ("named_tensors", "load_format"), "load_tensors"),
            ("load_weights_from_distributed", ("named_tensors",), "load_received"),
            ("update_weights_from_ipc", ("recv_req",), "receive"),
        )
    ),
    _hook(
        f"{_LOADER}.DefaultModelLoader._get_weights_iterator",
        ("self", "source"),
        "an update from disk reads what was judged, and no second time",
        f"{_RUNNERS}:weights_of",
    ),
    _hook(
        f"{_LOADER}._modules_with_quant_method",
        ("model",),
        "an update prepares the modules that it wrote, and no others",
        "sglang_dsv4.updates.launches:modules_to_prepare",
        "SGLang's quantisation methods can run twice",
    ),
)

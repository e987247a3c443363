"""The supported SGLang range, and the table of every upstream name we rely on.

Whatever the package imports from SGLang, and every private name of its objects, has a row here (a test holds it). A row
says what we touch, with which signature, why, and when it can go. `install()` declares the hooks, applies them and
proves that each took; SGLang itself logs and swallows such failures, so we never trust it to have hooked anything.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang_dsv4 import compat_updates
from sglang_dsv4.errors import HookError, UnsupportedVersionError

SUPPORTED = ">=0.5.22,<0.5.24"
"""SGLang releases that have every seam of the table. setup.cfg repeats the lower bound only."""

PINNED = "0.5.23"
"""The release that the test suite runs end to end."""

MODEL_IMPL = "sglang_dsv4"
"""The word for `--model-impl`."""

EXTERNAL_PACKAGE = "sglang_dsv4.models"
"""The value of SGLANG_EXTERNAL_MODEL_PACKAGE that selects our classes where no plugin is loaded."""


@dataclass(frozen=True)
class Seam:
    """One upstream name we touch.

    target      dotted path below the sglang distribution
    kind        after, around: a hook on that function or method; step: a named argument-resolution step that we wrap;
                uses: a name we call, proven at every start; reads: one that a start does not look at, since importing
                its module early would freeze flags, or since it is an attribute of instances or serves one command.
                ci/check-upstream proves all of them from the source of each release
    parameters  leading parameter names that must be there, in this order; None where the target is no function
    handler     "module:function" of ours, imported only when the hook is declared
    """

    target: str
    kind: Literal["after", "around", "step", "uses", "reads"]
    parameters: tuple[str, ...] | None
    why: str
    until: str
    handler: str = ""


RESOLUTION_STEPS = "sglang.srt.arg_groups.resolution_hooks.register_resolution_hook"
OVERRIDABLE_STEPS = "sglang.srt.arg_groups.resolution_hooks._OVERRIDABLE_HOOKS"
HOOK_REGISTRY = "sglang.srt.plugins.hook_registry.HookRegistry"
NEVER = "as long as the package lives outside SGLang"

ALL_EXPERTS_MARK = "_sglang_require_global_experts"
"""Attribute of a parameter of a FusedMoE that has a row for every expert of all ranks: FusedMoE.weight_loader reads it,
ModelOptNvFp4FusedMoEMethod.create_weights sets it."""

_LOADER = "sglang.srt.model_loader"
_MODELS = "sglang.srt.models"
_MOE = "sglang.srt.layers.moe"
_TARGET = f"{_MODELS}.deepseek_v4.DeepseekV4ForCausalLM"
_DSPARK = f"{_MODELS}.deepseek_v4_dspark.DeepseekV4ForCausalLMDSpark"
_FUSED_MOE = f"{_MOE}.fused_moe_triton.layer.FusedMoE"

_USES: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    ("sglang.srt.arg_groups.model_override_base.resolving_view", ("server_args",), "the arguments once resolved"),
    ("sglang.srt.arg_groups.overrides.declare_resolution", ("server_args", "source"), "sets options of a launch"),
    (f"{_LOADER}.loader.RunaiModelStreamerLoader._prepare_weights", ("self", "model_name_or_path"), "finds the files"),
    (f"{_LOADER}.loader.DefaultModelLoader._prepare_weights", ("self", "model_name_or_path"), "finds the files"),
    (f"{_LOADER}.weight_utils.default_weight_loader", ("param", "loaded_weight"), "writes a parameter without its own"),
    ("sglang.srt.layers.linear.get_group_rank_size", ("group",), "this rank's part of wo_a"),
    (f"{_MOE}.get_moe_runner_backend", (), "Marlin keeps one tensor scale for w1 and w3"),
    ("sglang.srt.eplb.expert_location.get_global_expert_location_metadata", (), "where redundant experts lie"),
    ("sglang.srt.runtime_context.get_parallel", (), "the ranks that an expert's width is dealt out to"),
    ("sglang.srt.runtime_context.get_server_args", (), "the model path of target and draft"),
    ("sglang.srt.runtime_context.get_model", (), "options of reading: memory map, read-ahead, page cache"),
    ("sglang.srt.runtime_context.get_exec", (), "whether this rank joins a running server"),
    ("sglang.srt.distributed.parallel_state.get_world_group", (), "the ranks that load the target together"),
    ("sglang.srt.distributed.parallel_state.get_tp_group", (), "the ranks of one stage, which load a draft together"),
)
"""Rows of kind `uses`: target, leading parameters, why. They stay as long as the package lives outside SGLang."""

_READS: tuple[tuple[str, tuple[str, ...] | None, str], ...] = (
    (f"{_TARGET}.load_weights", ("self", "weights", "is_nextn"), "ours stands in its place"),
    (f"{_TARGET}.post_load_weights", ("self",), "ends an initial load"),
    (f"{_TARGET}._prewarm_mhc_kernels", ("self",), "the same"),
    (
        f"{_TARGET}._setup_fp8_wo_a_scales",
        ("self", "is_nextn"),
        "replaces FP8 wo_a scales, also of one layer",
    ),
    (f"{_TARGET}.remap_weight_name_to_dpsk_hf_format", ("name", "is_nextn", "num_hidden_layers"), "its module paths"),
    (f"{_TARGET}.set_embed_and_head", ("self", "embed", "head"), "NextN: a draft's own embedding and head stay"),
    (f"{_TARGET}.pp_group", None, "first and last pipeline stage"),
    (f"{_MODELS}.deepseek_v4_nextn.DeepseekV4ForCausalLMNextN.load_weights", ("self", "weights"), "the same for NextN"),
    (f"{_DSPARK}.load_weights", ("self", "weights"), "the same for DSpark"),
    (f"{_DSPARK}._remap_dspark_weight_name", ("self", "name"), "SGLang's names of a DSpark draft"),
    (f"{_DSPARK}.attach_shared_modules", ("self", "embed_tokens", "lm_head"), "a draft's own embedding and head stay"),
    (f"{_DSPARK}.uses_own_vocab_modules", None, "makes SGLang build a draft's own embedding and head"),
    (f"{_DSPARK}.num_stages", None, "how many stages are built"),
    (f"{_DSPARK}.confidence_head", None, "whether it is built"),
    (f"{_FUSED_MOE}._num_global_routed", None, "how many experts all ranks hold"),
    (f"{_FUSED_MOE}.use_presharded_weights", None, "takes this rank's part instead of cutting it"),
    (f"{_FUSED_MOE}.moe_tp_rank", None, "whose part of a tensor it writes"),
    (
        "sglang.srt.layers.quantization.modelopt_quant.ModelOptNvFp4FusedMoEMethod.create_weights",
        ("self", "layer"),
        "makes parameters that bear ALL_EXPERTS_MARK",
    ),
    ("sglang.srt.layers.quantization.fp8.Fp8Config.is_fp4_experts", None, "what FusedMoE allocates"),
    (f"{_LOADER}.loader.RunaiModelStreamerLoader._is_distributed", None, "whether ranks share one read"),
    ("sglang.srt.utils.common.get_device", (), "where the model is built"),
    ("sglang.srt.utils.common.is_cuda_alike", (), "whether a distributed read goes to the GPU"),
    # The rest serves `load` and `bench`, which run without a server.
    ("sglang.srt.plugins.load_plugins", (), "what a server does first"),
    ("sglang.srt.server_args.prepare_server_args", ("argv",), "resolves arguments as a server does"),
    ("sglang.srt.runtime_context.publish", ("server_args",), "makes them known in this process"),
    ("sglang.srt.runtime_context.SpawnRanks", None, "which rank this process is"),
    ("sglang.srt.runtime_context.spawn_world_rank", ("server_args",), "the same"),
    (f"{_MOE}.initialize_moe_config", (), "the MoE runner"),
    (f"{_MOE}.utils.draft_model_build_scope", (), "the MoE runner of a draft"),
    ("sglang.srt.layers.quantization.fp8_utils.initialize_fp8_gemm_config", (), "the FP8 product"),
    ("sglang.srt.distributed.bootstrap.init_parallel_runtime", ("server_args",), "the process groups"),
    ("sglang.srt.distributed.bootstrap.init_layer_runtime", ("model_config",), "buffers that layers ask for"),
    ("sglang.srt.distributed.parallel_state.destroy_model_parallel", (), "takes the groups down again"),
    ("sglang.srt.distributed.parallel_state.destroy_distributed_environment", (), "the same"),
    (
        "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue.create_from_process_group",
        ("pg",),
        "left out for a rank without peers",
    ),
    ("sglang.srt.configs.device_config.DeviceConfig", None, "argument of a loader"),
    ("sglang.srt.configs.load_config.LoadConfig", None, "argument of a loader"),
    ("sglang.srt.configs.model_config.ModelConfig.from_server_args", ("server_args",), "argument of a loader"),
    (f"{_LOADER}.get_model_loader", ("load_config", "model_config"), "SGLang's own loader"),
    (f"{_LOADER}.loader.DefaultModelLoader.load_weights_and_postprocess", ("model", "weights"), "what bench times"),
    (f"{_MODELS}.deepseek_v4._dequant_fp8", ("weight", "scale"), "what bench compares with"),
    ("sglang.srt.layers.quantization.fp8.cast_e2m1fn_to_e4m3fn", ("x", "scale"), "what bench compares with"),
)
"""Rows of kind `reads`, in the same form."""


SEAMS: tuple[Seam, ...] = (
    *(Seam(*row) for row in compat_updates.HOOKS),
    *(Seam(target, "reads", parameters, why, NEVER) for target, parameters, why in (*_READS, *compat_updates.READS)),
    *(Seam(target, "uses", parameters, why, NEVER) for target, parameters, why in (*_USES, *compat_updates.USES)),
    Seam(
        RESOLUTION_STEPS,
        "uses",
        ("name",),
        "the gate: decides in the parent, before a scheduler is spawned, and costs no import",
        NEVER,
    ),
    Seam(
        "sglang.srt.arg_groups.pipeline.handle_deprecated_dp_attention",
        "step",
        None,
        "first step: the launch is refused here as it was given; our version gate is here too",
        NEVER,
        "sglang_dsv4.plugin:on_first_step",
    ),
    Seam(
        "sglang.srt.arg_groups.pipeline.handle_model_specific_adjustments",
        "step",
        None,
        "where SGLang picks the MoE runner for the model: the launch is decided or refused here",
        NEVER,
        "sglang_dsv4.plugin:on_model_step",
    ),
    Seam(
        "sglang.srt.arg_groups.pipeline.validate_deepep_v2_dispatch_token_budget",
        "step",
        None,
        "the last step: runner, all-to-all and EP are final, and the decision must still hold",
        NEVER,
        "sglang_dsv4.plugin:on_last_step",
    ),
    Seam(
        "sglang.srt.arg_groups.model_override_base.model_config_of",
        "uses",
        ("server_args",),
        "the parent's ModelConfig, whose is_fp4_experts the runner's default looks at",
        "SGLang tells FP4 experts per model and for object storage",
    ),
    Seam(
        f"{_LOADER}.utils.get_model_architecture",
        "after",
        ("model_config",),
        "selects our classes by --model-impl; the registry would ignore the flag",
        "SGLang dispatches on --model-impl itself",
        "sglang_dsv4.plugin:choose_class",
    ),
    Seam(
        f"{_LOADER}.loader.DefaultModelLoader._get_all_weights",
        "around",
        ("self", "model_config", "model"),
        "reads only the shards and tensors that this load needs, and marks an initial load",
        "SGLang lets a model name the tensors it wants",
        "sglang_dsv4.models.loading.source:open_local",
    ),
    Seam(
        f"{_LOADER}.loader.RunaiModelStreamerLoader._get_all_weights",
        "around",
        ("self", "model_config", "model"),
        "the same for local files and object storage through the RunAI streamer",
        "SGLang lets a model name the tensors it wants",
        "sglang_dsv4.models.loading.source:open_streamed",
    ),
    Seam(
        "sglang.srt.configs.model_config.ModelConfig._config_draft_model",
        "after",
        ("self",),
        "gives every process the config in one spelling, with a quantisation section that fits the tensors",
        "SGLang reads the config of newer Transformers, and V4 checkpoints of every quantiser",
        "sglang_dsv4.decisions.hf_config:adapt",
    ),
    Seam(
        f"{_FUSED_MOE}.weight_loader",
        "uses",
        ("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        "writes routed experts without upstream's search through every expert mapping",
        NEVER,
    ),
    Seam(
        f"{_FUSED_MOE}._weight_loader_impl",
        "uses",
        ("self", "param", "loaded_weight", "weight_name", "shard_id", "expert_id"),
        "is called once for each row of a parameter that is written, which is the proof of it",
        "SGLang reports what a weight loader wrote",
    ),
    Seam(
        f"{_FUSED_MOE}._map_global_expert_id_to_local_expert_id",
        "uses",
        ("self", "expert_id"),
        "which experts this rank keeps, so that foreign ones are neither read nor missed",
        "SGLang reports the experts a layer keeps",
    ),
)


_hooked: list[str] = []  # targets proven to be hooked in this process


def installed_version() -> str | None:
    """SGLang's version from its metadata, without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_supported(version: str | None = None) -> str:
    """The installed SGLang version, or UnsupportedVersionError when it lies outside `SUPPORTED`."""
    from packaging.specifiers import SpecifierSet

    version = version or installed_version()
    if version is None:
        raise UnsupportedVersionError(
            "SGLang is not installed",
            expected=f"sglang{SUPPORTED}",
            remedy=f"Install it beside this package: pip install 'sglang[runai]=={PINNED}'.",
        )
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise UnsupportedVersionError(
            "--model-impl sglang_dsv4 does not support this SGLang release",
            found=f"sglang {version}",
            expected=f"sglang{SUPPORTED}",
            remedy=f"Install sglang=={PINNED}, drop --model-impl sglang_dsv4, or apply the patch series for your "
            "release (patches/README.md).",
        )
    return version


def resolve(target: str) -> Any:
    """The upstream object behind a dotted path; HookError when it is gone."""
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise HookError(
            f"the upstream name {target} cannot be resolved",
            found=f"{type(error).__name__}: {error}",
            expected=f"the name as in sglang {PINNED}",
            remedy="Install a supported SGLang release, or report this release to the sglang-dsv4 project.",
        ) from error


def check_signature(seam: Seam) -> None:
    """HookError when the target is gone or does not begin with the parameters of its row."""
    target = resolve(seam.target)
    if seam.parameters is None:
        return
    found = tuple(inspect.signature(target).parameters)
    if found[: len(seam.parameters)] != seam.parameters:
        raise HookError(
            f"the signature of {seam.target} changed",
            found=f"({', '.join(found)})",
            expected=f"({', '.join(seam.parameters)}, ...)",
            remedy=f"Install sglang {SUPPORTED}; this row exists because: {seam.why}.",
        )


def handler_of(seam: Seam) -> Callable[..., Any]:
    """The row's handler, imported when it is first called: importing it here would import the model modules too early,
    which freeze environment flags that argument resolution has yet to write."""
    module, _, name = seam.handler.partition(":")

    def handler(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    handler.__name__ = name
    return handler


def check_step(seam: Seam) -> None:
    """HookError when SGLang no longer lets this resolution step be wrapped."""
    name = seam.target.rpartition(".")[2]
    known = resolve(OVERRIDABLE_STEPS)
    if name not in known:
        raise HookError(
            f"the argument-resolution step {name} is gone",
            found=f"{len(known)} other steps",
            expected=f"the step as in sglang {PINNED}",
            remedy=f"Install sglang {SUPPORTED}; this row exists because: {seam.why}.",
        )


def add_step(seam: Seam) -> None:
    """Wrap a named resolution step with the row's handler `fn(server_args, previous)`."""
    check_step(seam)
    resolve(RESOLUTION_STEPS)(seam.target.rpartition(".")[2])(handler_of(seam))


def steps() -> list[Seam]:
    """The rows that wrap a step of argument resolution."""
    return [seam for seam in SEAMS if seam.kind == "step"]


def install(seams: tuple[Seam, ...] | None = None) -> list[str]:
    """Check every row, declare the hooks, apply them, and prove that each target is no longer the original.

    Returns the targets that are hooked. Raises HookError for the first row that is gone, changed or did not take.
    Calling it again is harmless.
    """
    rows = SEAMS if seams is None else seams
    for seam in rows:
        if seam.kind not in ("step", "reads"):
            check_signature(seam)
    hooks = [seam for seam in rows if seam.kind in ("after", "around")]
    fresh = [seam for seam in hooks if seam.target not in _hooked]
    registry = resolve(HOOK_REGISTRY)
    kinds = resolve("sglang.srt.plugins.hook_registry.HookType")
    originals = {seam.target: resolve(seam.target) for seam in fresh}
    for seam in fresh:
        registry.register(seam.target, handler_of(seam), kinds[seam.kind.upper()])
    registry.apply_hooks()
    for target, original in originals.items():
        if resolve(target) is original:
            raise HookError(
                f"the hook on {target} did not take",
                found="the original function after HookRegistry.apply_hooks()",
                expected="our wrapper",
                remedy="Another plugin has hooked the same target: list the plugins to load in SGLANG_PLUGINS.",
            )
        _hooked.append(target)
    return list(_hooked)

"""The places in SGLang 0.5.23 that refuse a CPU or an out-of-tree platform, and what stands there instead.

SGLang only logs a hook that it cannot apply. None of these can be missed silently: without it the start fails in the
function that the hook would have replaced.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dsv4_cpu_platform.hashing import murmur_hash32

ATTENTION_BACKEND = "dsv4"  # the name that SGLang forces for V4 architectures
ALLOWED_SUBSYSTEMS = ("the DeepSeek-V4 KV pool",)


def _rope_without_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The branch for a CPU knows no YaRN; the general one is plain PyTorch."""
    return original(*args, **{**kwargs, "device": None})


def _allow_dsv4_pool(original: Callable[..., Any], platform: Any, *, subsystem: str) -> Any:
    """The V4 pool is plain tensors and works on a CPU."""
    return None if subsystem in ALLOWED_SUBSYSTEMS else original(platform, subsystem=subsystem)


def _keep_config(original: Callable[..., Any], model_config: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Upstream pads the one KV head for AMX kernels, which V4's attention refuses."""
    return model_config


def _invariant_already(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> None:
    """Upstream swaps in GPU kernels; the reference runs one sequence at a time, so no batch can change its bits."""


def _hash_in_numpy(_original: Callable[..., Any], *args: Any) -> Any:
    return murmur_hash32(*args)


def _draft_steps(_original: Callable[..., Any], factory: Any) -> tuple[str, Any]:
    from dsv4_cpu_platform.backend import DraftStepsBackend

    return ATTENTION_BACKEND, DraftStepsBackend(factory.draft_model_runner, factory.speculative_num_steps)


def _draft_prefill(_original: Callable[..., Any], factory: Any) -> tuple[str, Any]:
    from dsv4_cpu_platform.backend import PoolsOnlyBackend

    return ATTENTION_BACKEND, PoolsOnlyBackend(factory.draft_model_runner)


def _build_tree_in_triton(_original: Callable[..., Any], *args: Any) -> Any:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    return sgl_build_tree_kernel_triton(*args)


def _verify_tree_in_triton(_original: Callable[..., Any], topk: int = -1, **tensors: Any) -> Any:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(**tensors)
    return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]


declared = False  # in this process, by `declare`

HOOKS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _rope_without_device),
    ("sglang.srt.platforms.interface.reject_out_of_tree_path", _allow_dsv4_pool),
    ("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", _hash_in_numpy),
    ("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", _invariant_already),
    ("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_decode_backend", _draft_steps),
    ("sglang.srt.speculative.draft_utils.DraftBackendFactory._create_dsv4_prefill_backend", _draft_prefill),
    ("sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func", _build_tree_in_triton),
    ("sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func", _verify_tree_in_triton),
    ("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _keep_config),
)


def declare() -> None:
    """Declare the hooks; SGLang applies them, and rebinds every module that imported the originals."""
    choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    for target, hook in HOOKS:
        HookRegistry.register(target, hook, HookType.AROUND)
    global declared
    declared = True

"""The expansion stage: what a file holds quantised and SGLang does not becomes BF16; what is BF16 already passes.

Which modules these are is told by the model that SGLang built. `wo_a`, the grouped output projection, is one unless the
FP8 absorb GEMM runs; the compressor's and indexer's projections are, which Base releases store in FP8; a shared expert
is where the producer stored it as NVFP4. Copying FP8 codes into a BF16 parameter would not even warn. So the rule is
per tensor and by dtype, not by a flag or by what other layers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.formats import SCALE_SUFFIXES
from sglang_dsv4.errors import NumericsError
from sglang_dsv4.stream.pairing import Half, Ledger, pair

if TYPE_CHECKING:
    import torch

    from sglang_dsv4.stream import Named, Stream

Unquantised = Callable[[str], bool]
"""Whether SGLang holds a module (its native name, without `.weight`) unquantised."""

PACKED = "weight_packed"
TENSOR_SCALE = "weight_global_scale"
ACTIVATION_SCALE = "input_global_scale"


def half_of(name: str, tensor: torch.Tensor, unquantised: Unquantised) -> Half | None:
    """Which half of a pair to expand this is; None for other tensors and for a weight that is not quantised.

    Raises NumericsError for a weight of such a module that is neither FP8 (E4M3) nor BF16, FP16 or FP32.
    """
    import torch

    module, _, leaf = name.rpartition(".")
    if leaf not in ("weight", PACKED, *SCALE_SUFFIXES) or not unquantised(module):
        return None
    if leaf in SCALE_SUFFIXES:
        return Half(module, "scale")
    if leaf == PACKED or tensor.dtype == torch.float8_e4m3fn:
        return Half(module, "weight")
    if tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return None
    raise NumericsError(
        f"{name} has a dtype that cannot be expanded to BF16",
        found=str(tensor.dtype),
        expected="float8_e4m3fn with a block scale, or bfloat16",
        remedy="Use a checkpoint that stores this tensor in FP8 or BF16.",
    )


def expand(
    stream: Stream, unquantised: Unquantised, block: tuple[int, int], ledger: Ledger | None = None
) -> Iterator[Named]:
    """FP8 weight + its block scale, or NVFP4 weight + its scales, of such a module -> BF16 weight; the rest passes.

    block: (rows, columns) of one FP8 scale as configured, (128, 128) for V4. Values: FP32 product, rounded to nearest
    even. An activation scale of such a module is dropped: a BF16 product has no use for it. Raises what `pair` and the
    conversions of `numerics` raise.
    """

    def convert(module: str, weight: torch.Tensor, scale: torch.Tensor) -> Iterator[Named]:
        from sglang_dsv4.numerics.fp8 import fp8_to_bf16
        from sglang_dsv4.numerics.nvfp4 import nvfp4_to_bf16

        name = f"{module}.weight"
        if weight.element_size() == 1 and not weight.is_floating_point():
            yield name, nvfp4_to_bf16(weight, scale, name=name)
        else:
            yield name, fp8_to_bf16(weight, scale, block, name=name)

    ledger = Ledger() if ledger is None else ledger
    whole = _whole_scales(stream, unquantised, ledger)
    return pair(whole, lambda name, tensor: half_of(name, tensor, unquantised), convert, ledger)


def _whole_scales(stream: Stream, unquantised: Unquantised, ledger: Ledger) -> Iterator[Named]:
    """compressed-tensors' two scales of an NVFP4 weight become one: `weight_scale / weight_global_scale`."""
    import torch

    def half(name: str, tensor: torch.Tensor) -> Half | None:
        module, _, leaf = name.rpartition(".")
        if leaf == TENSOR_SCALE and unquantised(module):
            return Half(f"{module}.scale", "scale")
        grouped = leaf in SCALE_SUFFIXES and tensor.dtype == torch.float8_e4m3fn
        return Half(f"{module}.scale", "weight") if grouped and unquantised(module) else None

    def divide(name: str, groups: torch.Tensor, whole: torch.Tensor) -> Iterator[Named]:
        ledger.pairs -= 1  # no weight yet
        yield name, groups.float() / whole.reshape(())

    kept = (
        (name, tensor)
        for name, tensor in stream
        if not (name.endswith(f".{ACTIVATION_SCALE}") and unquantised(name.rpartition(".")[0]))
    )
    return pair(kept, half, divide, ledger)

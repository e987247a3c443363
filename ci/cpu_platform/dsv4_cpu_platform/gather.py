"""The whole SGLang parameter tree in every rank: shards of all ranks exchanged and put together.

Where a parameter was cut is read from the module that owns it, not from its name.
"""

from dataclasses import dataclass

import torch
from torch import nn


class CpuPlatformError(RuntimeError):
    """The loaded parameters cannot be put into the reference model, or a request cannot be followed."""


@dataclass(frozen=True)
class Cut:
    """One axis along which a rank holds ``1 / size`` of a parameter, ``rank``-th in order.

    ``parts``: the axis is this many stacked matrices (gate and up), each of them cut.
    """

    axis: int
    rank: int
    size: int
    parts: int = 1


Piece = tuple[tuple[Cut, ...], torch.Tensor]
# As bytes, because torch cannot pickle every dtype: cuts, dtype, shape, (N,) uint8.
Sent = tuple[tuple[Cut, ...], torch.dtype, torch.Size, torch.Tensor]


def whole_parameters(model: nn.Module, draft: bool) -> dict[str, torch.Tensor]:
    """Every parameter of the model, un-sharded, by its SGLang name and in its own dtype.

    Collective: every rank of the server must call it; for a draft under pipeline parallelism every rank of the last
    stage, which alone holds it. Raises CpuPlatformError when ranks disagree on a replica.
    """
    mine = local_pieces(model)
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {name: tensor for name, (_, tensor) in mine.items()}
    from sglang.srt.distributed.parallel_state import get_tp_group, get_world_group
    from sglang.srt.runtime_context import get_server_args

    # The arguments, because while a draft is loaded SGLang's context speaks of one stage.
    one_stage = draft and get_server_args().pp_size > 1
    group = (get_tp_group() if one_stage else get_world_group()).cpu_group
    received: list[dict[str, Sent]] = [{} for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather_object(received, {name: _send(*piece) for name, piece in mine.items()}, group=group)
    everyone = [{name: _receive(*sent) for name, sent in pieces.items()} for pieces in received]
    # Pipeline stages hold different names, so the union is over all ranks.
    names = dict.fromkeys(name for pieces in everyone for name in pieces)
    return {name: join(name, [pieces[name] for pieces in everyone if name in pieces]) for name in names}


def _send(cuts: tuple[Cut, ...], tensor: torch.Tensor) -> Sent:
    return cuts, tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8)


def _receive(cuts: tuple[Cut, ...], dtype: torch.dtype, shape: torch.Size, raw: torch.Tensor) -> Piece:
    return cuts, raw.view(dtype).reshape(shape)


def local_pieces(model: nn.Module) -> dict[str, Piece]:
    """This rank's parameters, each with the cuts that made it."""
    pieces: dict[str, Piece] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            pieces[name] = (cuts_of(module, leaf), parameter.data)
    return pieces


def cuts_of(module: nn.Module, leaf: str) -> tuple[Cut, ...]:
    """How SGLang cut the parameter ``leaf`` of ``module``; empty for one that every rank holds whole."""
    from sglang.srt.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        RowParallelLinear,
        get_group_rank_size,
    )
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, FusedMoE):
        experts = Cut(0, module.moe_ep_rank, module.moe_ep_size)
        width = (
            Cut(1, module.moe_tp_rank, module.moe_tp_size, parts=2)
            if leaf.startswith("w13_")
            else Cut(2, module.moe_tp_rank, module.moe_tp_size)
        )
        return tuple(cut for cut in (experts, width) if cut.size > 1)
    if not isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)):
        return ()
    if isinstance(module, VocabParallelEmbedding) and not module.enable_tp:
        return ()
    rank, size = get_group_rank_size(module.tp_group)
    if size == 1:
        return ()
    if isinstance(module, RowParallelLinear):
        return (Cut(1, rank, size),)
    parts = len(module.output_sizes) if isinstance(module, MergedColumnParallelLinear) else 1
    return (Cut(0, rank, size, parts),)


def join(name: str, pieces: list[Piece]) -> torch.Tensor:
    """Put the pieces of one parameter together. Raises CpuPlatformError when two holders of one piece differ."""
    held: dict[tuple[int, ...], torch.Tensor] = {}
    for cuts, tensor in pieces:
        place = tuple(cut.rank for cut in cuts)
        if place in held and not same_bytes(held[place], tensor):
            raise CpuPlatformError(f"{name}: two ranks hold different values of the same piece {place}")
        held[place] = tensor
    return _join(name, held, pieces[0][0])


def _join(name: str, held: dict[tuple[int, ...], torch.Tensor], cuts: tuple[Cut, ...]) -> torch.Tensor:
    if not cuts:
        return held[()]
    first, rest = cuts[0], cuts[1:]
    pieces = []
    for rank in range(first.size):
        below = {place[1:]: tensor for place, tensor in held.items() if place[0] == rank}
        if not below:
            raise CpuPlatformError(f"{name}: no rank holds piece {rank} of {first.size} along axis {first.axis}")
        pieces.append(_join(name, below, rest))
    split = [piece.chunk(first.parts, first.axis) for piece in pieces]
    return torch.cat([piece[part] for part in range(first.parts) for piece in split], first.axis)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit (NaN equals NaN, 0.0 differs from -0.0)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))

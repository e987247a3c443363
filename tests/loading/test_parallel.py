"""What the ranks hold adds up to the full experts, exactly, with and without conversion."""

from itertools import product

import formats
import jobs
import numpy as np
import pytest
import shards

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
GRIDS = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 4), (4, 2), (8, 8)]
EXPERTS = 8
LAYERS = (0, 1)


def ranks(loader, checkpoint, tp, ep, flags, fused=()):
    """The kept parameters of every rank, in rank order."""
    arguments = ("--tp-size", str(tp), "--ep-size", str(ep), *fused)
    keep = r"\.mlp\.(experts|shared_experts)\.|\.wo_a\.weight$"
    return [
        loader.load(checkpoint, arguments=arguments, flags=flags, tp_rank=rank, keep=keep).kept for rank in range(tp)
    ]


def part(kept, module, index, projection, *, packed):
    """One projection of one expert as a rank holds it, dequantised. index: its place in the fused parameter; None for
    a shared expert in a module of its own."""
    names = ("w13_weight", "w2_weight") if index is not None else ("gate_up_proj.weight", "down_proj.weight")
    name = f"{module}.{names[projection == 'w2']}"
    arrays = [kept[name], kept[f"{name}_scale_inv"]]
    if index is not None:
        arrays = [array[index] for array in arrays]
    if projection != "w2":  # w1 lies above w3
        arrays = [np.split(array, 2)[projection == "w3"] for array in arrays]
    return formats.dequantized(*arrays, packed=packed)


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize(("tp", "ep"), GRIDS, ids=[f"tp{tp}-ep{ep}" for tp, ep in GRIDS])
def test_the_ranks_parts_are_the_full_experts(loader, wide, tp, ep, flags):
    held = ranks(loader, wide, tp, ep, flags)
    files = shards.tensors(wide)
    width, local = tp // ep, EXPERTS // ep
    for layer, expert, projection in product(LAYERS, range(EXPERTS), ("w1", "w2", "w3")):
        owners = held[expert // local * width : (expert // local + 1) * width]
        module = f"model.layers.{layer}.mlp.experts"
        parts = [part(kept, module, expert % local, projection, packed=not flags) for kept in owners]
        whole = formats.stored(files, f"layers.{layer}.ffn.experts.{expert}.{projection}")
        assert np.array_equal(np.concatenate(parts, 1 if projection == "w2" else 0), whole)
    for layer, projection in product(LAYERS, ("w1", "w2", "w3")):
        module = f"model.layers.{layer}.mlp.shared_experts"
        parts = [part(kept, module, None, projection, packed=False) for kept in held]
        whole = formats.stored(files, f"layers.{layer}.ffn.shared_experts.{projection}")
        assert np.array_equal(np.concatenate(parts, 1 if projection == "w2" else 0), whole)


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize(("intermediate", "tp"), [(384, 2), (768, 4)])
def test_a_width_that_does_not_end_on_a_block_is_followed_by_zeros(loader, shaped, intermediate, tp, flags):
    checkpoint = shaped(moe_intermediate_size=intermediate, num_attention_heads=8, o_groups=8)
    held = ranks(loader, checkpoint, tp, 1, flags)
    files = shards.tensors(checkpoint)
    modules = [("mlp.experts", expert, f"experts.{expert}") for expert in range(EXPERTS)]
    for layer, (module, index, native), projection in product(
        LAYERS, [*modules, ("mlp.shared_experts", None, "shared_experts")], ("w1", "w2", "w3")
    ):
        packed = not flags and index is not None
        parts = [part(kept, f"model.layers.{layer}.{module}", index, projection, packed=packed) for kept in held]
        whole = formats.stored(files, f"layers.{layer}.ffn.{native}.{projection}")
        axis = 1 if projection == "w2" else 0
        found, rest = np.split(np.concatenate(parts, axis), [intermediate], axis)
        assert np.array_equal(found, whole)
        assert rest.size
        assert not rest.any()


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_ranks_rows_are_the_full_wo_a(loader, wide, tp):
    held = ranks(loader, wide, tp, 1, {})
    files = shards.tensors(wide)
    for layer in LAYERS:
        rows = np.concatenate([kept[f"model.layers.{layer}.self_attn.wo_a.weight"] for kept in held])
        assert np.array_equal(rows, formats.stored(files, f"layers.{layer}.attn.wo_a"))


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1)])
def test_a_fused_shared_expert_is_cut_and_converted_like_the_routed_ones(loader, wide, tp, ep):
    held = ranks(loader, wide, tp, ep, DEQUANT, jobs.FUSED)
    files = shards.tensors(wide)
    width, local = tp // ep, EXPERTS // ep
    for layer, projection, group in product(LAYERS, ("w1", "w2", "w3"), range(ep)):
        owners = held[group * width : (group + 1) * width]
        module = f"model.layers.{layer}.mlp.experts"
        parts = [part(kept, module, local, projection, packed=False) for kept in owners]
        whole = formats.stored(files, f"layers.{layer}.ffn.shared_experts.{projection}")
        assert np.array_equal(np.concatenate(parts, 1 if projection == "w2" else 0), whole)


@pytest.mark.parametrize("draft", [False, True], ids=["target", "draft"])
def test_experts_that_are_fp8_already_load_the_same_whatever_the_flag_says(loader, made, draft):
    checkpoint = made(expert_format="fp8", draft="mtp")
    how = {"draft": draft, "arguments": jobs.NEXTN if draft else ()}
    values = ({}, {"SGLANG_DSV4_FP4_DEQUANT": "0"}, DEQUANT)
    unset, off, on = (loader.load(checkpoint, flags=flags, **how).digests for flags in values)
    assert unset == off == on

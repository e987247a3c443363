"""FP8 linears that are cut, fused or grouped, against scales laid out one by one, and against SGLang's classes."""

from __future__ import annotations

import ast
import itertools

import pytest
import sglang_source
from model_sizes import FLASH, PRO, V41

from sglang_dsv4.checkpoint.modules import ModuleKind, all_modules
from sglang_dsv4.decisions.dense import CUT, GROUPED, SHARED, UNSCALED, WHOLE, Dense, cut_refusals, held_refusals

BLOCK = (128, 128)


def held(*dense, block=BLOCK, fuses=True, groups=8, arch="cpu"):
    return [refusal.code for refusal in held_refusals(dense, block, fuses=fuses, groups=groups, arch=arch)]


def test_every_linear_of_every_release_is_in_one_table():
    places = {row.place for _, row in all_modules() if row.kind is ModuleKind.LINEAR}
    tables = [frozenset(CUT), WHOLE, SHARED, UNSCALED]
    assert frozenset().union(*tables) == places
    assert sum(map(len, tables)) == len(places)


AXES = {"ColumnParallelLinear": "rows", "RowParallelLinear": "columns", "ReplicatedLinear": None, "Linear": None}
"""SGLang's class, or torch's -> what ranks share of it."""

BUILT = {
    "srt/models/deepseek_v4.py": {
        "wqkv_a": ("attn.wq_a", "attn.wkv"),
        "wq_a": ("attn.wq_a",),
        "wkv": ("attn.wkv",),
        "wq_b": ("attn.wq_b",),
        "wo_a": ("attn.wo_a",),
        "wo_b": ("attn.wo_b",),
    },
    "srt/models/deepseek_v4_nextn.py": {"e_proj": ("e_proj",), "h_proj": ("h_proj",)},
    "srt/models/deepseek_v4_dspark.py": {"main_proj": ("main_proj",), "markov_w2": ()},  # of no release in FP8
    "srt/layers/attention/dsv4/compressor.py": {"wkv_gate": ("attn.compressor.wkv", "attn.compressor.wgate")},
    "srt/layers/attention/dsv4/dsv41_sparse.py": {
        "wkv_gate": ("attn.compressor.wkv", "attn.compressor.wgate"),
        "wkv": ("attn.compressor.wkv",),
        "wgate": ("attn.compressor.wgate",),
        "wk": ("attn.indexer.wk",),
        "wq_b": ("attn.indexer.wq_b",),
        "weights_proj": ("attn.indexer.weights_proj",),
    },
    "srt/layers/attention/dsv4/indexer.py": {
        "wq_b": ("attn.indexer.wq_b",),
        "weights_proj": ("attn.indexer.weights_proj",),
    },
    "srt/layers/engram.py": {"wkv": ("engram.wkv",)},
}
"""File -> attribute of each linear that it builds -> the native places that it holds."""


def linears(path):
    """(attribute, class) of every linear that a file builds as `self.<attribute> = ...Linear(...)`."""
    for node in ast.walk(ast.parse((sglang_source.root() / path).read_text())):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        called, target = node.value.func, node.targets[0]
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in AXES and isinstance(target, ast.Attribute):
            yield target.attr, name


@pytest.mark.parametrize("path", BUILT)
def test_sglang_cuts_what_the_tables_say(path):
    found = list(linears(path))
    assert {attribute for attribute, _ in found} == set(BUILT[path])
    for attribute, kind in found:
        for place in BUILT[path][attribute]:
            assert place in {*CUT, *WHOLE, *UNSCALED}
            assert CUT.get(place) == AXES[kind], place


def wrong_rows(first, second, tile):
    """Rows of two tensors laid one below the other whose scale, laid likewise, is another row's or lies beyond."""
    scales = [("first", row) for row in range(-(-first // tile))] + [
        ("second", row) for row in range(-(-second // tile))
    ]
    rows = [("first", row // tile) for row in range(first)] + [("second", row // tile) for row in range(second)]
    expected = len(range(0, first + second, tile))
    return len(scales) != expected or any(scales[at // tile] != owner for at, owner in enumerate(rows))


@pytest.mark.parametrize("tile", [32, 128])
def test_fused_parts_against_scales_laid_out_one_by_one(tile):
    outcomes = set()
    for first, second in itertools.product(range(16, 400, 16), (64, 96, 512, 576)):
        refused = held(Dense("attn.wq_a", first, 256), Dense("attn.wkv", second, 256), block=(tile, tile))
        assert (refused == ["parallel-fused-block"]) == wrong_rows(first, second, tile), (first, second)
        outcomes.add(bool(refused))
    assert outcomes == {False, True}


def test_parts_that_are_apart_or_in_bf16_are_not_fused():
    parts = Dense("attn.wq_a", 192, 256), Dense("attn.wkv", 512, 256)
    assert held(*parts) == ["parallel-fused-block"]
    assert held(*parts, fuses=False) == held(parts[0]) == held(parts[1]) == []
    (refusal,) = held_refusals(parts, BLOCK, fuses=True, groups=2, arch="cpu")
    assert (refusal.found, refusal.expected, refusal.remedy) == (
        "192 rows",
        "a multiple of 128",
        "Set SGLANG_OPT_FUSE_WQA_WKV=0.",
    )


@pytest.mark.parametrize("block", [(32, 32), (128, 128), (64, 128)])
def test_cut_parts_against_slices_counted_out(block):
    for share, extent in itertools.product((1, 2, 3, 4, 8), range(32, 2049, 32)):
        for place, axis in CUT.items():
            linear = Dense(place, extent, 96) if axis == "rows" else Dense(place, 96, extent)
            borders = [extent * rank / share for rank in range(1, share)]
            refused = list(cut_refusals([linear], block, share))
            tile = block[0] if axis == "rows" else block[1]
            assert bool(refused) == any(border % tile for border in borders), (place, extent, share)
    assert not list(cut_refusals([Dense(place, 96, 96) for place in WHOLE], block, 8))


def test_a_group_of_wo_a_ends_on_blocks():
    assert held(Dense(GROUPED, 384, 1024), groups=3) == []
    assert held(Dense(GROUPED, 384, 1024), groups=2) == ["parallel-group-block"]
    assert held(Dense(GROUPED, 512, 64), groups=4) == ["parallel-group-block"]


def test_an_input_that_ends_within_a_block_has_no_product_on_a_gpu():
    dense = Dense("attn.wq_b", 2048, 192), Dense("attn.indexer.wq_b", 512, 192), Dense("e_proj", 320, 320)
    assert held(*dense) == []
    found = list(held_refusals(dense, BLOCK, fuses=True, groups=2, arch="sm90"))
    assert [(refusal.code, refusal.found) for refusal in found] == [
        ("parallel-dense-columns", "192 columns"),
        ("parallel-dense-columns", "320 columns"),
    ]
    assert found[0].what.startswith("attn.wq_b, attn.indexer.wq_b: ")
    assert held(*dense, block=(32, 32), arch="sm90") == []


QUANTISERS = (
    "_per_token_group_quant_8bit_raw",
    "sglang_per_token_group_quant_fp8",
    "sglang_per_token_group_quant_fp8_row_padded",
)
PRODUCTS = ("triton_w8a8_block_fp8_linear", "cutlass_w8a8_block_fp8_linear_with_fallback")
PRODUCTS += ("deepgemm_w8a8_block_fp8_linear_with_fallback", "flashinfer_gemm_w8a8_block_fp8_linear_with_fallback")


def functions(path):
    tree = ast.parse((sglang_source.root() / path).read_text())
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_sglangs_fp8_products_quantise_whole_groups():
    bodies = functions("kernels/ops/quantization/fp8_kernel.py")
    for name in QUANTISERS:
        assert "assert x.shape[-1] % group_size == 0" in bodies[name], name
    bodies = functions("srt/layers/quantization/fp8_utils.py")
    for name in PRODUCTS:
        assert "per_token_group_quant_fp8" in bodies[name], name


@pytest.mark.parametrize("sizes", [FLASH, PRO, V41])
@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
def test_the_releases_end_on_blocks(sizes, arch):
    found = held_refusals(sizes.dense, sizes.block, fuses=True, groups=sizes.o_groups, arch=arch)
    assert [refusal.what for refusal in found] == []

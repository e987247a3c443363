"""What the package and the patched SGLang both promise; `test_patched_release.py` runs this file on the latter too."""

from __future__ import annotations

import itertools
import json
import operator
import shutil
import threading

import numpy as np
import pytest
import torch
from subjects import DEQUANT, EXPERTS, subject

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
WO_A = "layers.0.attn.wo_a"
SPELLINGS = ("scale", "weight_scale", "weight_scale_inv")
BLOCKS = ((128, 128), (32, 32))


@pytest.fixture(scope="module")
def it():
    return subject()


# --- wo_a while it streams ----------------------------------------------------------------------------------------


def fp8_codes(rows=256, columns=256):
    codes = torch.arange(rows * columns).reshape(rows, columns) % 251
    return (codes + 5 * (codes % 128 == 127)).to(torch.uint8).view(FP8)


def scales(rows, columns, block, dtype=E8M0):
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return torch.randint(110, 130, grid, generator=torch.manual_seed(1)).to(torch.uint8).view(E8M0).to(dtype)


def dequantised(weight, scale, block):
    rows = np.arange(weight.shape[0]) // block[0]
    columns = np.arange(weight.shape[1]) // block[1]
    with np.errstate(over="ignore"):  # BF16 has the same range: infinity is the right answer
        product = weight.float().numpy() * scale.float().numpy()[rows[:, None], columns]
    return torch.from_numpy(product).to(torch.bfloat16)


def through_one_buffer(items):
    """Every tensor is valid until the next step and no longer."""
    buffer = torch.empty(1 << 20, dtype=torch.uint8)
    for name, tensor in items:
        raw = tensor.contiguous().view(torch.uint8)
        view = buffer[: raw.numel()]
        view.copy_(raw.flatten())
        yield name, view.view(tensor.dtype).view(tensor.shape)
        buffer.fill_(0x55)


@pytest.mark.parametrize("dtype", [E8M0, torch.float32])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_wo_a_is_dequantised_in_either_order(it, spelling, block, dtype):
    weight = fp8_codes(320)
    scale = scales(320, 256, block, dtype)
    pair = [(f"{WO_A}.weight", weight), (f"{WO_A}.{spelling}", scale)]
    other = ("norm.weight", torch.ones(3))
    for first, second in (pair, pair[::-1]):
        found = dict(it.wo_a(through_one_buffer([first, other, second]), block))
        assert sorted(found) == [f"{WO_A}.weight", "norm.weight"]
        assert torch.equal(found[f"{WO_A}.weight"], dequantised(weight, scale, block))


def test_every_fp8_code_times_every_scale(it):
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    weight = torch.tensor(finite, dtype=torch.uint8).repeat(255, 1).view(FP8)
    scale = torch.arange(255, dtype=torch.uint8).view(E8M0)[:, None]
    items = [(f"{WO_A}.weight", weight), (f"{WO_A}.scale", scale)]
    found = dict(it.wo_a(iter(items), (1, len(finite))))[f"{WO_A}.weight"]
    expected = dequantised(weight, scale, (1, len(finite)))
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_bf16_wo_a_passes_at_once_beside_fp8_ones(it):
    bf16 = torch.ones(4, 4, dtype=torch.bfloat16)
    items = [("layers.1.attn.wo_a.weight", bf16), (f"{WO_A}.weight", fp8_codes()), (f"{WO_A}.scale", torch.ones(2, 2))]
    for order in itertools.permutations(items):
        source = iter(order)
        for name, tensor in it.wo_a(source, (128, 128)):
            if tensor is bf16:
                assert name == "layers.1.attn.wo_a.weight"
                assert len(list(source)) == 2 - order.index(items[0])
                break
        else:
            pytest.fail("the BF16 wo_a did not come out")


def test_no_more_than_the_waiting_half_is_held(it):
    pair = [(f"{WO_A}.weight", fp8_codes()), (f"{WO_A}.scale", torch.ones(2, 2))]
    many = [(f"layers.{i}.norm.weight", torch.ones(1)) for i in range(50)]
    source = iter([pair[0], *many, pair[1]])
    for step, (name, _) in enumerate(it.wo_a(source, (128, 128))):
        if step < len(many):
            assert name == many[step][0]
            assert operator.length_hint(source) == len(many) - step  # nothing was read ahead


@pytest.mark.parametrize(
    "items",
    [
        [(f"{WO_A}.weight", fp8_codes())],
        [(f"{WO_A}.scale", torch.ones(2, 2))],
        [(f"{WO_A}.weight", fp8_codes())] * 2,
        [(f"{WO_A}.weight", fp8_codes()), (f"{WO_A}.scale", torch.ones(2, 1))],
        [(f"{WO_A}.weight", fp8_codes()), (f"{WO_A}.scale", torch.ones(2, 2, dtype=torch.int32))],
    ],
    ids=["no scale", "no weight", "two weights", "scale shape", "scale dtype"],
)
def test_a_broken_wo_a_is_refused_by_name(it, items):
    with pytest.raises(ValueError, match=WO_A):
        list(it.wo_a(iter(items), (128, 128)))


# --- FP4 to FP8 -----------------------------------------------------------------------------------------------------


def packed(rows=256, columns=256, seed=2):
    size = (rows, columns // 2)
    return torch.randint(0, 256, size, generator=torch.manual_seed(seed)).to(torch.uint8).view(torch.int8)


def exponents(spread, rows=256, columns=256, top=120):
    return top - (torch.arange(rows)[:, None] + torch.arange(columns // 32)) % (spread + 1)


def e8m0(bytes_):
    return bytes_.to(torch.uint8).view(E8M0)


def fp4_values(weight, scale):
    codes = weight.view(torch.uint8).numpy()
    values = E2M1[np.stack([codes & 15, codes >> 4], axis=2)].reshape(len(codes), -1)
    return np.ldexp(values, scale.view(torch.uint8).numpy().astype(int).repeat(32, axis=1) - 127)


def fp8_values(weight, scale, block):
    factor = scale.view(torch.uint8).numpy().astype(int).repeat(block[0], axis=0).repeat(block[1], axis=1)
    return np.ldexp(weight.float().numpy().astype(np.float64), factor - 127)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("spread", [0, 5, 14])
def test_fp4_becomes_fp8_value_for_value(it, spread, block):
    weight, scale = packed(), e8m0(exponents(spread))
    found, block_scale = it.fp4_to_fp8(weight, scale, block)
    assert found.dtype == FP8
    assert tuple(block_scale.shape) == (256 // block[0], 256 // block[1])
    expected = fp4_values(weight, scale)
    result = fp8_values(found, block_scale, block)
    assert np.array_equal(result, expected)
    assert np.array_equal(np.signbit(result), np.signbit(expected))
    if block == (128, 128):
        assert set(block_scale.view(torch.uint8).flatten().tolist()) == {120 - 6}


def test_groups_of_zeros_count_for_nothing(it):
    weight, scale = packed(), exponents(14)
    weight[9, 16:32], scale[9, 1] = 0, 3
    found, block_scale = it.fp4_to_fp8(weight, e8m0(scale), (128, 128))
    assert np.array_equal(fp8_values(found, block_scale, (128, 128)), fp4_values(weight, e8m0(scale)))


@pytest.mark.parametrize(
    ("row", "group", "byte"), [(3, 1, 120 - 15), (3, 1, 255), (255, 7, 120 + 15)], ids=["far below", "NaN", "far above"]
)
def test_what_would_round_is_refused(it, row, group, byte):
    weight = torch.full((256, 128), 0x17, dtype=torch.int8)  # 6 and 0.5 in every group
    scale = exponents(0)
    scale[row, group] = byte
    with pytest.raises(ValueError, match=r"blocks|NaN"):
        it.fp4_to_fp8(weight, e8m0(scale), (128, 128))


@pytest.mark.parametrize("byte", [0, 3, 6, 254])
def test_scales_near_the_ends_of_e8m0(it, byte):
    weight, scale = packed(), e8m0(torch.full((256, 8), byte))
    found, block_scale = it.fp4_to_fp8(weight, scale, (128, 128))
    assert np.array_equal(fp8_values(found, block_scale, (128, 128)), fp4_values(weight, scale))


# --- which experts a checkpoint has -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Headers only: FP4 and FP8 experts in both models, and an FP8 target with an FP4 draft."""
    from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

    root = tmp_path_factory.mktemp("experts")
    for kind in ("fp4", "fp8"):
        make_tiny(root / kind, Options(expert_format=kind, draft="mtp", sparse=True))
        config = root / kind / "config.json"
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "expert_dtype"}))
    mixed = shutil.copytree(root / "fp8", root / "mixed")
    index = mixed / "model.safetensors.index.json"
    ours, theirs = (json.loads((root / kind / index.name).read_text())["weight_map"] for kind in ("fp8", "fp4"))
    draft = {shard for name, shard in theirs.items() if name.startswith("mtp.")}
    for shard in draft:
        shutil.copy(root / "fp4" / shard, mixed / f"draft-{shard}")
    kept = {name: shard for name, shard in ours.items() if not name.startswith("mtp.")}
    moved = {name: f"draft-{shard}" for name, shard in theirs.items() if name.startswith("mtp.")}
    for shard in set(ours.values()) - set(kept.values()):
        (mixed / shard).unlink()
    index.write_text(json.dumps({"metadata": {}, "weight_map": moved | kept}))
    return root


CELLS = list(itertools.product((None, "0", "1"), (None, "0", "1"), ("fp4", "fp8")))


@pytest.mark.parametrize(("stated", "dequant", "kind"), CELLS)
def test_the_header_decides_and_flags_must_agree(it, checkpoints, stated, dequant, kind):
    flags = {name: value for name, value in ((EXPERTS, stated), (DEQUANT, dequant)) if value is not None}
    is_fp4 = kind == "fp4"
    if stated is not None and (stated == "1") != is_fp4:
        with pytest.raises(ValueError, match=EXPERTS):
            it.experts(checkpoints / kind, False, flags)
    else:
        assert it.experts(checkpoints / kind, False, flags) == (is_fp4, is_fp4 and dequant == "1")


def test_target_and_draft_are_judged_apart(it, checkpoints):
    for dequant in ("0", "1"):
        flags = {DEQUANT: dequant}
        assert it.experts(checkpoints / "mixed", False, flags) == (False, False)
        assert it.experts(checkpoints / "mixed", True, flags) == (True, dequant == "1")


# --- which runner may meet them ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "triton", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"])
def test_converted_experts_run_on_fp8_runners(it, name):
    it.runner(name, dequant=True)


@pytest.mark.parametrize(
    ("name", "dequant"), [("marlin", True), ("humming", True), ("flashinfer_mxfp4", True), ("triton", False)]
)
def test_a_runner_that_cannot_read_them_is_refused(it, name, dequant):
    with pytest.raises(ValueError, match=r"SGLANG_DSV4_FP4_DEQUANT|runner"):
        it.runner(name, dequant)


# --- the queue -----------------------------------------------------------------------------------------------------


def test_queued_copies_are_bounded_in_bytes(it):
    go, queued = threading.Event(), []

    def fill(pool):
        for number in range(8):
            queued.append(number)
            pool.submit(torch.zeros(1024, dtype=torch.uint8), lambda tensor: go.wait(20))

    with it.copies(3 * 1024) as pool:
        thread = threading.Thread(target=fill, args=(pool,))
        thread.start()
        thread.join(0.5)
        assert queued == [0, 1, 2, 3]
        go.set()
        thread.join(20)
    assert len(queued) == 8


def test_a_failed_copy_is_raised_before_the_end(it):
    def fail(tensor):
        raise ValueError("bad shape")

    def fill():
        with it.copies(1024) as pool:
            for number in range(1000):
                read.append(number)
                pool.submit(torch.zeros(1024, dtype=torch.uint8), fail)

    read: list[int] = []
    with pytest.raises(ValueError, match="bad shape"):
        fill()
    assert len(read) < 4

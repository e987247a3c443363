"""The parts of the CPU platform that no server is needed for."""

import struct
from types import SimpleNamespace

import dsv4_cpu_platform
import pytest
import torch
from dsv4_cpu_platform.forward import rows_per_request, tokens_given
from dsv4_cpu_platform.gather import CpuPlatformError, Cut, join
from dsv4_cpu_platform.hashing import murmur_hash32
from dsv4_cpu_platform.mapping import Reader
from dsv4_cpu_platform.slots import Inputs, SlotStore
from sglang.srt.model_executor.forward_batch_info import ForwardMode


@pytest.mark.parametrize("selected", [None, "", "another"])
def test_an_unselected_platform_offers_nothing(monkeypatch: pytest.MonkeyPatch, selected: str | None) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dsv4_cpu_platform.os, "environ", dict(SGLANG_PLATFORM=selected) if selected is not None else {})
    assert dsv4_cpu_platform.activate() is None
    assert "TRITON_INTERPRET" not in dsv4_cpu_platform.os.environ


def test_a_selected_platform_keeps_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsv4_cpu_platform.os, "environ", {"SGLANG_PLATFORM": "dsv4_cpu", "TRITON_INTERPRET": "0"})
    assert dsv4_cpu_platform.activate() == "dsv4_cpu_platform.platform.Dsv4CpuPlatform"
    assert dsv4_cpu_platform.os.environ["TRITON_INTERPRET"] == "0"
    assert dsv4_cpu_platform.os.environ["SGLANG_OPT_USE_TILELANG_MHC_PRE"] == "0"


def test_shards_of_stacked_halves_join_in_order() -> None:
    """Gate and up, each cut by rows: ranks hold (gate_r, up_r), the whole is (gate, up)."""
    whole = torch.arange(16).reshape(8, 2)
    gate, up = whole.chunk(2)
    pieces = [
        ((Cut(0, rank, 2, parts=2),), torch.cat((gate[2 * rank : 2 * rank + 2], up[2 * rank : 2 * rank + 2])))
        for rank in (1, 0)
    ]
    assert torch.equal(join("gate_up", pieces), whole)


def test_experts_cut_twice_join_in_order() -> None:
    whole = torch.arange(4 * 2 * 6).reshape(4, 2, 6)
    pieces = [
        ((Cut(0, ep, 2), Cut(2, tp, 2)), whole[2 * ep : 2 * ep + 2, :, 3 * tp : 3 * tp + 3])
        for tp in (1, 0)
        for ep in (0, 1)
    ]
    assert torch.equal(join("w2", pieces), whole)


def test_replicas_that_differ_are_refused() -> None:
    zero = torch.zeros(2)
    with pytest.raises(CpuPlatformError, match=r"norm.*different values"):
        join("norm", [((), zero), ((), -zero)])


def test_a_missing_shard_is_refused() -> None:
    with pytest.raises(CpuPlatformError, match="no rank holds piece 1 of 2"):
        join("wq_b", [((Cut(0, 0, 2),), torch.zeros(2, 2))])


def test_parameters_left_over_are_refused() -> None:
    reader = Reader({"a.weight": torch.zeros(2), "b.weight": torch.zeros(2), "x.attn_mqa.k_scale": torch.ones(())})
    reader.values("a.weight", (128, 128))
    with pytest.raises(CpuPlatformError, match=r"read by no row.*b\.weight$"):
        reader.finish()


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)},
        {"a.weight": torch.zeros(2, 2, dtype=torch.int8)},
        {"a.weight": torch.zeros(2, 2, dtype=torch.bfloat16), "a.weight_scale_inv": torch.ones(1, 1)},
        {"a.weight": torch.zeros(2, 64, dtype=torch.int8), "a.weight_scale_inv": torch.ones(2, 3)},
    ],
)
def test_a_weight_and_a_scale_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CpuPlatformError, match=r"a\.weight"):
        Reader(tensors).values("a.weight", (128, 128))


def test_a_prefix_that_nobody_wrote_is_refused() -> None:
    store = SlotStore(0)
    store.write(torch.tensor([3, 1]), Inputs(torch.tensor([7, 8]), torch.empty(2, 0)))
    assert store.read(torch.tensor([1, 3])).ids.tolist() == [8, 7]
    for slot in (2, 4):
        with pytest.raises(CpuPlatformError, match="never written"):
            store.read(torch.tensor([1, slot]))


@pytest.mark.parametrize(
    ("mode", "lengths", "requests", "tokens", "expected"),
    [
        (ForwardMode.DECODE, None, None, 3, [1, 1, 1]),
        (ForwardMode.TARGET_VERIFY, None, None, 9, [3, 3, 3]),
        (ForwardMode.EXTEND, [4, 2, 1], None, 7, [4, 2, 1]),
        (ForwardMode.DECODE, None, 2, 2, [1, 1]),  # the third request only fills up the batch
        (ForwardMode.EXTEND, [4, 1, 0], 2, 5, [4, 1]),
        (ForwardMode.IDLE, None, 0, 0, []),
    ],
)
def test_rows_are_those_of_the_requests(mode, lengths, requests, tokens: int, expected: list[int]) -> None:
    assert rows_per_request(batch_of_three(mode, lengths, requests), tokens) == expected


def test_rows_that_do_not_come_out_even_are_refused() -> None:
    for batch in (batch_of_three(ForwardMode.DECODE), batch_of_three(ForwardMode.EXTEND, [4, 2, 0])):
        with pytest.raises(CpuPlatformError, match="7 tokens for 3 requests"):
            rows_per_request(batch, 7)


def test_padding_is_told_from_tokens() -> None:
    assert tokens_given(SimpleNamespace(_original_num_tokens=None), 8) == 8
    assert tokens_given(SimpleNamespace(_original_num_tokens=0), 8) == 0


def batch_of_three(mode: ForwardMode, lengths: list[int] | None = None, requests: int | None = None) -> SimpleNamespace:
    """The fields of SGLang's ForwardBatch that are read, for three requests of which ``requests`` are no padding."""
    return SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=lengths, batch_size=3, _original_batch_size=requests)


def test_the_hash_is_murmur3_of_sixteen_bytes() -> None:
    seeds, positions, columns = [1, 2**63 + 12345], [0, 77], [0, 1, 511]
    hashed = murmur_hash32(torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.tolist() == expected


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, on Python's integers; ``data`` is a multiple of four bytes long."""
    word, state = 2**32 - 1, 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 & word
        block = (block << 15 | block >> 17) & word
        state ^= block * 0x1B873593 & word
        state = (state << 13 | state >> 19) & word
        state = (state * 5 + 0xE6546B64) & word
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor & word
    return state ^ state >> 16

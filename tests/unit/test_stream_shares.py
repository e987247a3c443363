"""Cut first, convert second: what all ranks hold together is the expert of the file, value for value.

The widths are those of the releases in small: 256 and 768 share out evenly over 2, 384 and 768 need a padded last part
over 2 and 4, and 288 in blocks of 32 is V4.1's 2304 over 8.
"""

import numpy as np
import pytest
import torch

from sglang_dsv4.decisions.parallel import padded_width
from sglang_dsv4.stream.experts import experts_to_fp8
from sglang_dsv4.stream.shard import Cut, shard

HIDDEN = 128
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CASES = [(256, 128, 2), (384, 128, 2), (768, 128, 4), (1024, 128, 8), (288, 32, 2), (288, 32, 4), (288, 32, 8)]


def drawn(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed weight and its E8M0 scales, ten binades apart at most: always exact in FP8."""
    generator = np.random.default_rng(seed)
    packed = generator.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale = generator.integers(115, 126, (rows, columns // 32), dtype=np.uint8)
    return torch.from_numpy(packed).view(torch.int8), torch.from_numpy(scale).view(torch.float8_e8m0fnu)


def fp4_values(packed: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    codes = packed.view(torch.uint8).numpy()
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(codes.shape[0], -1)
    return values * np.repeat(np.exp2(scale.view(torch.uint8).numpy().astype(np.float32) - 127), 32, 1)


def fp8_values(weight: torch.Tensor, scale: torch.Tensor, block: int) -> np.ndarray:
    factors = np.exp2(scale.view(torch.uint8).numpy().astype(np.float32) - 127)
    factors = np.repeat(np.repeat(factors, block, 0), block, 1)[: weight.shape[0], : weight.shape[1]]
    return weight.float().numpy() * factors


def held(module: str, pair: tuple[torch.Tensor, torch.Tensor], cuts: dict[str, Cut], block: int) -> np.ndarray:
    """What one rank holds of one projection after the two stages."""
    tensors = [(f"{module}.weight", pair[0]), (f"{module}.scale", pair[1])]
    stream = shard(tensors, lambda name, _: cuts[name.rpartition(".")[2]])
    out = dict(experts_to_fp8(stream, (block, block)))
    return fp8_values(out[f"{module}.weight"], out[f"{module}.scale"], block)


@pytest.mark.parametrize(("width", "block", "ranks"), CASES)
def test_all_ranks_together_hold_the_whole_expert(width: int, block: int, ranks: int):
    w1, w2 = drawn(width, HIDDEN, 1), drawn(HIDDEN, width, 2)
    share = padded_width(width, ranks, ranks, (block, block)) // ranks
    rows, columns = [], []
    for rank in range(ranks):
        start = rank * share
        whole = {"weight": Cut(0, start, share), "scale": Cut(0, start, share)}
        packed = {"weight": Cut(1, start // 2, share // 2), "scale": Cut(1, start // 32, share // 32)}
        rows.append(held("layers.0.ffn.experts.0.w1", w1, whole, block))
        columns.append(held("layers.0.ffn.experts.0.w2", w2, packed, block))
    together = np.concatenate(rows), np.concatenate(columns, 1)
    expected = fp4_values(*w1), fp4_values(*w2)
    np.testing.assert_array_equal(together[0][:width], expected[0])
    np.testing.assert_array_equal(together[1][:, :width], expected[1])
    assert not together[0][width:].any()
    assert not together[1][:, width:].any()

"""One byte changed in a tensor of every kind: the strong oracle names each of them, and nothing else.

All of the changes are in one checkpoint, each in another of transformers' tensors, so that one load shows them all. It
is loaded by two ranks, cut by width, with `wo_a` converted to BF16: what they hold must join to the file's numbers.
"""

import random
import re
import shutil
from pathlib import Path

import numpy as np
import oracle
import pytest
import servers
from safetensors.torch import load_file

# A change of the last bit of a small number: the least that a byte can do.
MASK = 1


def kind(name: str, tensor: oracle.Stored) -> tuple[str, str, tuple[int, ...]]:
    """Tensors that differ only in layer and expert are of one kind; CSA's and HCA's compressors differ in shape."""
    return re.sub(r"\.\d+\.", ".N.", name), tensor.dtype, tensor.shape


def choose(tensors: dict[str, oracle.Stored]) -> dict[str, str]:
    """Native name of one tensor of each kind -> the transformers tensor that it changes, no two of them alike."""
    by_kind: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        if oracle.target(name) is not None:
            by_kind.setdefault(kind(name, tensor), []).append(name)
    chosen: dict[str, str] = {}
    # the kinds with the fewest tensors choose first
    for names in sorted(by_kind.values(), key=len):
        free = [name for name in names if oracle.target(name) not in chosen.values()]
        chosen[free[-1]] = str(oracle.target(free[-1]))
    return chosen


def seen(tensors: dict[str, oracle.Stored], name: str, place: int) -> bool:
    """Whether the byte matters: not the scale of a group of zeros, and no number that becomes NaN."""
    weight = re.sub(r"\.scale$", ".weight", name)
    before = oracle.values(tensors, weight).copy()
    tensors[name].data[place] ^= MASK
    after = oracle.values(tensors, weight).copy()
    tensors[name].data[place] ^= MASK
    return not np.array_equal(before, after) and not np.isnan(after).any()


def change_one_byte(tensors: dict[str, oracle.Stored], name: str, rng: random.Random) -> None:
    """Flip the last bit of one number, on disk."""
    tensor = tensors[name]
    step = {"BF16": 2, "F32": 4, "I64": 8}.get(tensor.dtype, 1)
    place = next(
        place
        for place in iter(lambda: rng.randrange(len(tensor.data) // step) * step, None)
        if seen(tensors, name, place)
    )
    with tensor.path.open("r+b") as file:
        file.seek(tensor.offset + place)
        file.write(bytes([int(tensor.data[place]) ^ MASK]))


@pytest.fixture(scope="module")
def changed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the checkpoint with one byte of each kind changed, and what was changed."""
    folder = tmp_path_factory.mktemp("faults") / "checkpoint"
    shutil.copytree(checkpoint, folder)
    tensors = oracle.read_checkpoint(folder)
    chosen, rng = choose(tensors), random.Random(3)
    for name in chosen:
        change_one_byte(tensors, name, rng)
    return folder, chosen


@pytest.mark.in_turns(2)
def test_one_byte_of_every_kind_is_caught(checkpoint: Path, changed, tmp_path: Path) -> None:
    folder, chosen = changed
    parameters = tmp_path / "parameters.safetensors"
    env = {"DSV4_CPU_DUMP_PARAMETERS": str(parameters), "SGLANG_OPT_FP8_WO_A_GEMM": "0"}
    with servers.serving(folder, "--tp-size", "2", log=tmp_path / "log", env=env):
        loaded = load_file(parameters)
    assert oracle.differences(oracle.state(folder), loaded) == []
    good = oracle.state(checkpoint)
    assert sorted(oracle.differences(good, loaded)) == sorted(chosen.values())
    for native, place in chosen.items():
        different = int((good[place] != loaded[place].numpy()).sum())
        assert different == 1 or native.endswith(".scale"), (native, different)

"""Coverage-guided fuzzing of the header parser: `python tests/unit/fuzz_headers.py -runs=1000000 CORPUS`.

Needs `pip install atheris`. An input is a shard file, a header's text, or a recipe for a nearly valid header. What
must hold: only our own errors come out, every message can be printed, and what is accepted the safetensors library
accepts too. An input that breaks this goes, as a shard file, to tests/data/headers, where a test replays it.
"""

import json
import math
import sys

import atheris

with atheris.instrument_imports(include=["sglang_dsv4"]):
    from sglang_dsv4.checkpoint import headers
    from sglang_dsv4.checkpoint.storage import FileState, Storage
    from sglang_dsv4.errors import HeaderError, TruncatedShardError

from safetensors import deserialize

DTYPES = sorted(headers.DTYPE_BITS)
ODD_VALUES = (None, True, -1, 2**63, 2**64, 0.5, "x", [], {}, [1, 2, 3], "F32", 10**4000)


class OneFile(Storage):
    """A shard in memory."""

    def __init__(self, content: bytes):
        super().__init__("memory")
        self.content = content

    def _list(self):
        return {"s": FileState(len(self.content), ())}

    def _read(self, name, start, length):
        return self.content[start : start + length]


def shard_of(data: bytes) -> bytes:
    """The shard file an input stands for."""
    kind = data[:1]
    if kind < b"\x40":
        return data[1:]
    if kind < b"\x80":
        return framed(data[2:], data[1] if len(data) > 1 else 0)
    return recipe(atheris.FuzzedDataProvider(data[1:]))


def framed(text: bytes, data: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + b"\0" * data


def recipe(choose: "atheris.FuzzedDataProvider") -> bytes:
    """A header that is valid but for what the input says to disturb."""
    table: dict = {}
    position = 0
    for _ in range(choose.ConsumeIntInRange(0, 5)):
        name = choose.ConsumeUnicode(choose.ConsumeIntInRange(0, 4))
        dtype = DTYPES[choose.ConsumeIntInRange(0, len(DTYPES) - 1)]
        shape = [choose.ConsumeIntInRange(0, 5) for _ in range(choose.ConsumeIntInRange(0, 3))]
        end = position + math.prod(shape) * headers.DTYPE_BITS[dtype] // 8
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        disturb = choose.ConsumeIntInRange(0, 15)
        odd = ODD_VALUES[choose.ConsumeIntInRange(0, len(ODD_VALUES) - 1)]
        if disturb < 3:
            entry[("dtype", "shape", "data_offsets")[disturb]] = odd
        elif disturb < 5:
            entry["data_offsets"][disturb - 3] = odd
        elif disturb == 5:
            shape.append(odd)
        elif disturb == 6:
            del entry[("dtype", "shape", "data_offsets")[choose.ConsumeIntInRange(0, 2)]]
        elif disturb == 7:
            end += choose.ConsumeIntInRange(-3, 3)
        table[name] = odd if disturb == 8 else entry
        position = end
    text = json.dumps(table, ensure_ascii=choose.ConsumeBool()).encode("utf-8", "surrogatepass")
    return framed(text, max(0, position + choose.ConsumeIntInRange(0, 3) // 3))


def one_input(data: bytes) -> None:
    content = shard_of(data)
    try:
        headers.read_header(OneFile(content), "s", len(content))
    except (HeaderError, TruncatedShardError) as error:
        str(error).encode("utf-8")
        return
    deserialize(content)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()

"""What no header has shown: names and shapes where no header was read, and scales that are no numbers.

Without headers come weight updates and formats of other loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sglang_dsv4.checkpoint.formats import SCALE_SUFFIXES
from sglang_dsv4.checkpoint.names import collapse, counted
from sglang_dsv4.errors import StreamError

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named, Stream

SCALES = frozenset((*SCALE_SUFFIXES, "weight_scale_2"))
"""Last part of the names of what multiplies a weight."""


def audit(stream: Stream, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Named]:
    """Pass the tensors that the model knows, in the shape it expects, each once; hold back the others.

    shapes: native name -> shape as the checkpoint of this model has it. At the end of the stream one StreamError lists
    everything that was held back. The stream may bring any part of the names.
    """
    unexpected: list[str] = []
    repeated: list[str] = []
    wrong: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, tensor in stream:
        shape = shapes.get(name)
        if shape is None:
            unexpected.append(name)
        elif name in seen:
            repeated.append(name)
        elif tuple(tensor.shape) != shape:
            wrong.setdefault(f"found shape {list(tensor.shape)}, expected {list(shape)}", []).append(name)
        else:
            seen.add(name)
            yield name, tensor
    details = [f"unexpected: {line}" for line in collapse(unexpected)]
    details += [f"twice: {line}" for line in collapse(repeated)]
    details += [f"wrong: {line}: {fault}" for fault, names in wrong.items() for line in collapse(names)]
    if details:
        raise StreamError(
            f"not of this model: {counted(len(unexpected) + len(repeated) + sum(map(len, wrong.values())), 'tensor')}",
            expected="names and shapes of the checkpoint that the model was built from",
            remedy="Nothing of these was written; send what the model has.",
            details=details,
        )


def sound_scales(stream: Stream) -> Iterator[Named]:
    """Pass everything; NumericsError for a weight's scale that holds a NaN, an infinity or a negative number.

    For scales that nothing here multiplies with: SGLang would serve NaN without a word.
    """
    from sglang_dsv4.numerics.scales import check_scale

    for name, tensor in stream:
        if name.rpartition(".")[2] in SCALES:
            check_scale(tensor, name=name)
        yield name, tensor

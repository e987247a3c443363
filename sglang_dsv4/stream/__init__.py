"""Lazy transformations of a checkpoint stream: generators over (name, tensor), one tensor at a time.

Lifetime rule: a tensor that a source yields is valid until the next step of that source. Whatever is kept longer is a
clone, and only that is cloned. Nothing here calls list() or dict() on a stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]
    Stream = Iterable[Named]

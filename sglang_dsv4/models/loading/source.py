"""Where the tensors of an initial load come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def open_local(original: Callable[..., Iterator], loader: Any, model_config: Any, model: Any) -> Iterator:
    """AROUND DefaultModelLoader._get_all_weights."""
    return original(loader, model_config, model)


def open_streamed(original: Callable[..., Iterator], loader: Any, model_config: Any, model: Any) -> Iterator:
    """AROUND RunaiModelStreamerLoader._get_all_weights."""
    return original(loader, model_config, model)

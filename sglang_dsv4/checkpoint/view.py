"""A checkpoint's tensors by native module: what layout detection and completeness checks look at."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_dsv4.checkpoint.dialects import Dialect, detect_dialect
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.names import join_indices, split_indices
from sglang_dsv4.errors import IndexMismatchError

Indices = tuple[int, ...]
Parts = dict[str, TensorInfo]
"""The tensors of one module by native suffix: `weight`, `scale`, ...; "" for a tensor that is a place by itself."""


class NativeView:
    """Tensors grouped by native place template, then by indices.

    Attributes:
        tensors: all of them.
        dialect: how the file spells names.
        modules: place template (`layers.*.attn.wq_a`) -> indices ((3,)) -> the module's tensors.
        unknown: tensors that the dialect does not know.
        respelled: (file name, native name) of root and draft tensors under another spelling than the dialect's own.
    """

    def __init__(self, tensors: Iterable[TensorInfo], dialect: Dialect | None = None):
        self.tensors = tuple(tensors)
        by_template: dict[str, list[tuple[Indices, TensorInfo]]] = {}
        for info in self.tensors:
            template, indices = split_indices(info.name)
            by_template.setdefault(template, []).append((tuple(map(int, indices)), info))
        self.dialect = dialect or detect_dialect(by_template)
        self.modules: dict[str, dict[Indices, Parts]] = {}
        self.unknown: list[TensorInfo] = []
        self.respelled: list[tuple[str, str]] = []
        for template, rows in by_template.items():
            self._add(template, rows)

    def _add(self, template: str, rows: list[tuple[Indices, TensorInfo]]) -> None:
        found = self.dialect.read_template(template)
        if found is None:
            self.unknown += (info for _, info in rows)
            return
        place, suffix = found
        group = self.modules.setdefault(place, {})
        for indices, info in rows:
            parts = group.setdefault(indices, {})
            if suffix in parts:
                raise IndexMismatchError(
                    f"two names for one tensor: {parts[suffix].name} and {info.name}",
                    found=f"{parts[suffix].shard} and {info.shard}",
                    remedy="Remove one of them.",
                )
            parts[suffix] = info
        native = f"{place}.{suffix}" if suffix else place
        if self.dialect.from_native(native) != template and template != native:
            self.respelled += ((info.name, join_indices(native, list(map(str, indices)))) for indices, info in rows)

    def place(self, template: str) -> dict[Indices, Parts]:
        """The modules of one place; empty when the checkpoint has none."""
        return self.modules.get(template, {})

    def stages(self) -> list[int]:
        """The draft stages that hold any tensor, in order."""
        return sorted(
            {indices[0] for place, group in self.modules.items() if place.startswith("mtp.*.") for indices in group}
        )

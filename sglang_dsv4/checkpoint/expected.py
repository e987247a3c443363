"""Which tensors a DeepSeek-V4 of given sizes must have, and where a checkpoint differs: missing, unexpected, wrong.

Every layer kind is spelled out in `modules`; here the rows meet the tensors. Names are reported natively and collapsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.config_reader import RELEASED
from sglang_dsv4.checkpoint.dialects import ROOT_SPELLINGS
from sglang_dsv4.checkpoint.formats import classify, lacking, role, shape_faults
from sglang_dsv4.checkpoint.layout import DraftKind, Layout
from sglang_dsv4.checkpoint.modules import (
    NOT_TEXT,
    STACKED,
    Module,
    ModuleKind,
    derived,
    layer_modules,
    root_modules,
    stage_modules,
)
from sglang_dsv4.checkpoint.names import collapse, counted, join_indices
from sglang_dsv4.checkpoint.view import Indices, NativeView, Parts
from sglang_dsv4.errors import ConfigError, IncompleteLoadError

_FLOATS = ("BF16", "F32", "F16")
_INTEGERS = ("I64", "I32")

NAMES = ("missing", "unexpected")
"""Differences that a load survives when strictness is off."""


@dataclass(frozen=True, slots=True)
class Completeness:
    """Every difference between a checkpoint and the model its config describes, by native name, collapsed.

    `halves` lists what is missing of modules that are there in part, such as the scale of a weight, with what it is
    missing beside; `missing` the rest. `absent` lists what may be absent and is: sinks, an own head, a draft's own
    embedding.
    """

    missing: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def lines(self, *words: str) -> list[str]:
        """Every difference of these kinds (of `missing`, `unexpected`, `wrong`) after its kind.

        What is missing of a module that is there in part comes with `wrong`: no load survives it.
        """
        return [f"{word}: {line}" for word, lines in self._groups(words) for line in lines]

    def _groups(self, words: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
        halves = self.halves if "wrong" in words else ()
        missing = self.missing if "missing" in words else ()
        return [("missing", halves + missing), *((word, getattr(self, word)) for word in words if word != "missing")]

    def raise_if_incomplete(self, where: str, *, strict: bool = True) -> None:
        """One IncompleteLoadError that lists everything; nothing when the checkpoint is complete.

        With `strict` off only half a module and a wrong shape or dtype raise: SGLang would take the one for what it is
        not, and cut, pad or convert the other, without a word.
        """
        groups = self._groups((*NAMES, "wrong") if strict else ("wrong",))
        if not any(lines for _, lines in groups):
            return
        raise IncompleteLoadError(
            f"{where}: the tensors are not those of the model in config.json",
            found=", ".join(f"{counted(len(lines), 'kind')} {word}" for word, lines in groups if lines),
            remedy="Use the config.json of this checkpoint, or download the missing files.",
            details=[f"{word}: {line}{_tried(line, word)}" for word, lines in groups for line in lines],
        )


def _tried(line: str, word: str) -> str:
    """The other spellings under which a missing tensor of the root was looked for."""
    others = ROOT_SPELLINGS.get(line.removesuffix(".weight"), ()) if word == "missing" else ()
    return f" (nor as {', '.join(others)})" if others else ""


def compare(view: NativeView, config: ModelConfigFacts, layout: Layout, *, target: bool = False) -> Completeness:
    """Compare a checkpoint's tensors with the model of its config, of which `layout` says the drafts and FP8 blocks.

    target: whether the target must be there; else a view of `mtp.*` and no `layers.*` at all is a separate draft.
    """
    return _Comparison(view, config).run(layout, target=target)


class _Comparison:
    def __init__(self, view: NativeView, config: ModelConfigFacts) -> None:
        self.view, self.config = view, config
        self.block = (0, 0)
        self.missing: list[str] = []
        self.unexpected = [info.name for info in view.unknown]
        self.absent: list[str] = []
        self.halves: dict[tuple[str, str], list[str]] = {}  # (missing suffix, suffix that is there) -> names
        self.faults: dict[str, list[str]] = {}  # fault -> names
        self.expected: dict[str, set[Indices]] = {}
        self.verdicts: dict[tuple, tuple[_Fault, ...]] = {}
        self.layered = any(place.startswith("layers.*.") for place in view.modules)

    def run(self, layout: Layout, *, target: bool) -> Completeness:
        config, stages = self.config, layout.stages
        if target or self.layered or not self.view.stages():
            size = derived(config)
            self.block = _square(layout.target_dense.block)
            self._rows(root_modules(config.family), "", [()], size)
            rows = self._stack(layer_modules(config.family), "layers.*.")
            for layer in range(config["NL"]):
                here = [row for row in rows if _exists(row, config, layer)]
                self._rows(here, "layers.*.", [(layer,)], _with_rows(size, config, layer))
        if stages:
            self.block = _square(layout.draft_dense.block)
            size = derived(config, stage=layout.draft_kind is DraftKind.DSPARK)  # an MTP draft has the target's experts
            rows = self._stack(stage_modules(config.family, layout.draft_kind.value), "mtp.*.")
            for stage in range(stages):
                here = [row for row in rows if _in_stage(row, stage, stages)]
                self._rows(here, "mtp.*.", [(stage,)], size)
        self._surplus()
        return Completeness(
            missing=tuple(collapse(self.missing)),
            halves=tuple(_beside(line, *pair) for pair, names in self.halves.items() for line in collapse(names)),
            unexpected=tuple(collapse(self.unexpected)),
            wrong=tuple(f"{line}: {fault}" for fault, names in self.faults.items() for line in collapse(names)),
            absent=tuple(collapse(self.absent)),
        )

    def _stack(self, rows: Sequence[Module], prefix: str) -> Sequence[Module]:
        if not self.view.place(f"{prefix}ffn.experts.gate_up_proj"):
            return rows
        return [row for row in rows if row.kind is not ModuleKind.EXPERT] + list(STACKED)

    def _rows(self, rows: Iterable[Module], prefix: str, indices: list[Indices], size: dict[str, int]) -> None:
        experts: list[Indices] = [(e,) for e in range(size["E"])]
        allowed = self.absent if self.layered or prefix == "mtp.*." else self.missing  # of nothing, nothing is optional
        for row in rows:
            place = prefix + row.place
            shape = self._shape(row, place, size)
            group = self.view.place(place)
            tails = experts if row.kind is ModuleKind.EXPERT else [()]
            for at in (start + tail for start in indices for tail in tails):
                self.expected.setdefault(place, set()).add(at)
                parts = group.get(at)
                if parts is not None:
                    self._check(row, place, at, parts, shape)
                elif row.kind is ModuleKind.STACK and row.optional and self._lacks_scale(place, at):
                    self.halves.setdefault(("_scale", ""), []).append(_name(place, at, ""))
                else:
                    names = allowed if row.optional else self.missing
                    names.append(_name(place, at, "" if row.kind in _WHOLE else "weight"))

    def _lacks_scale(self, place: str, at: Indices) -> bool:
        """Whether the stacked experts that a scale belongs to are there, and quantised."""
        weight = self.view.place(place.removesuffix("_scale")).get(at)
        return weight is not None and bool(lacking({"weight": weight[""].dtype}))

    def _shape(self, row: Module, place: str, size: dict[str, int]) -> tuple[int, ...]:
        try:
            return tuple(size[symbol] for symbol in row.shape)
        except KeyError as symbol:
            raise ConfigError(
                f"config.json does not give the size of {place}",
                found=f"no value for {symbol} (NT and MR come from dspark_*, the rest from engram_*)",
                remedy=RELEASED,
            ) from None

    def _check(self, row: Module, place: str, at: Indices, parts: Parts, shape: tuple[int, ...]) -> None:
        key = (place, shape, tuple((suffix, info.dtype, info.shape) for suffix, info in parts.items()))
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.verdicts[key] = tuple(self._judge(row, parts, shape))
        for suffix, fault, beside in verdict:
            name = _name(place, at, suffix)
            if fault == _UNEXPECTED:
                self.unexpected.append(name)
            elif fault != _MISSING:
                self.faults.setdefault(fault, []).append(name)
            elif beside:
                self.halves.setdefault((f".{suffix}", f".{beside}"), []).append(name)
            else:
                self.missing.append(name)

    def _judge(self, row: Module, parts: Parts, shape: tuple[int, ...]) -> Iterator[_Fault]:
        """Everything that is wrong with one module's tensors."""
        if row.kind in (ModuleKind.LINEAR, ModuleKind.EXPERT):
            yield from self._judge_linear(parts, shape, self.block)
        elif row.kind is ModuleKind.TABLE:
            yield from self._judge_linear(parts, shape, (1, 32))
        else:
            wanted = "" if row.kind in _WHOLE else "weight"
            for suffix in parts:
                if suffix != wanted:
                    yield _Fault(suffix, _UNEXPECTED)
            if wanted not in parts:
                yield _Fault(wanted, _MISSING)
                return
            info = parts[wanted]
            found = info.shape[: len(shape)] if row.kind is ModuleKind.STACK else info.shape
            if found != shape:
                yield _Fault(wanted, _differs(info.shape, shape))
            dtypes = _INTEGERS if row.kind is ModuleKind.IDS else _FLOATS
            if row.kind is not ModuleKind.STACK and info.dtype not in dtypes:
                yield _Fault(wanted, f"found dtype {info.dtype}, expected {' or '.join(dtypes)}")

    def _judge_linear(self, parts: Parts, shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[_Fault]:
        by_role = {role(suffix): (suffix, info) for suffix, info in parts.items()}
        dtypes = {name: info.dtype for name, (_, info) in by_role.items()}
        rule = classify(dtypes)
        if rule is not None:
            shapes = {name: info.shape for name, (_, info) in by_role.items()}
            for name, found, wanted in shape_faults(rule, shapes, shape, block):
                yield _Fault(by_role[name][0], _differs(found, wanted))
        elif lacks := lacking(dtypes):
            for name in lacks:
                yield _Fault(name, _MISSING, beside=next(iter(parts)))
        else:
            siblings = ", ".join(sorted(parts))
            for suffix, info in by_role.values():
                yield _Fault(suffix, f"found dtype {info.dtype}, in no known set of siblings ({siblings})")

    def _surplus(self) -> None:
        for place, group in self.view.modules.items():
            if place.startswith(NOT_TEXT) and self.config.family == "v4.1":
                continue
            for at in group.keys() - self.expected.get(place, set()):
                self.unexpected += (_name(place, at, suffix) for suffix in group[at])


_WHOLE = (ModuleKind.BARE, ModuleKind.IDS, ModuleKind.STACK)
_MISSING, _UNEXPECTED = "missing", "unexpected"


class _Fault(NamedTuple):
    """One fault of a module: of the tensor with this suffix, what; and for a missing one, a suffix that is there."""

    suffix: str
    what: str
    beside: str = ""


def _square(edge: int | None) -> tuple[int, int]:
    return (edge or 128, edge or 128)


def _name(place: str, at: Indices, suffix: str) -> str:
    name = join_indices(place, list(map(str, at)))
    return f"{name}.{suffix}" if suffix else name


def _beside(line: str, lacks: str, there: str) -> str:
    """A collapsed line of missing names, all of which end in `lacks`, with what they are missing beside."""
    return f"{line} ({line.removesuffix(lacks)}{there} is without its {lacks[1:]})"


def _differs(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"found shape {list(found)}, expected {list(expected)}"


def _exists(row: Module, config: ModelConfigFacts, layer: int) -> bool:
    """Whether a target layer has a row, by the layer's kind."""
    ratio, hashed = config.ratios[layer], layer < config.hash_layers
    kv_source = layer in (config.raw.get("kv_source_layer_ids") or ())
    return {
        "every": True,
        "hash": hashed,
        "router": not hashed,
        "csa": ratio == 4,
        "hca": ratio == 128,
        "kv_source": kv_source,
        "gated_kv_source": kv_source and ratio > 1,
        "index_source": layer in (config.raw.get("index_source_layer_ids") or ()),
        "engram": layer in (config.raw.get("engram_layer_ids") or ()),
    }[row.where]


def _in_stage(row: Module, stage: int, stages: int) -> bool:
    return {"first": stage == 0, "last": stage == stages - 1}.get(row.where, True)


def _with_rows(size: dict[str, int], config: ModelConfigFacts, layer: int) -> dict[str, int]:
    """V4.1's Engram tables have a size of their own per layer."""
    layers, rows = (config.raw.get("engram_layer_ids") or ()), (config.raw.get("engram_num_embeddings") or ())
    return size | {"ROWS": rows[layers.index(layer)]} if layer in layers and len(rows) == len(layers) else size

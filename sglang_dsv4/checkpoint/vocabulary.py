"""The tensors that a model was built from, by native name: what an update may bring, and what belongs together.

Read once, when the model is built, and kept: an update opens no file, and the checkpoint may be gone by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from sglang_dsv4.checkpoint.dialects import DIALECTS, Dialect
from sglang_dsv4.checkpoint.expert_names import GATE_AND_UP, expert_name, stack_name
from sglang_dsv4.checkpoint.formats import role
from sglang_dsv4.checkpoint.headers import TensorInfo

WEIGHTS = frozenset({"weight", "weight_packed"})
PAIRED = frozenset({*WEIGHTS, "scale", "weight_scale_2", "weight_global_scale"})
"""Roles of one module that make one weight together; whoever sends one of them has to send the others."""

ACTIVATION_SCALES = frozenset({"input_scale", "input_global_scale"})
"""Roles that w1 and w3 of an expert have to agree on."""


class Stored(NamedTuple):
    """A tensor as the checkpoint has it: safetensors dtype label, shape."""

    dtype: str
    shape: tuple[int, ...]


class Unit(NamedTuple):
    """Tensors that have to come together: a name for them, and their native names."""

    name: str
    members: frozenset[str]


class Vocabulary:
    """Every tensor of one checkpoint.

    tensors: native name -> how it is stored. Names may come in any dialect. Several may know a name and mean different
    things by it: the checkpoint's own goes first, and one that makes it a tensor of this checkpoint before the others.
    """

    def __init__(self, infos: Iterable[TensorInfo], dialect: Dialect) -> None:
        self._dialects = (dialect, *(other for other in DIALECTS.values() if other is not dialect))
        self._read: dict[str, str] = {}
        kinds: dict[Stored, Stored] = {}
        self.tensors: dict[str, Stored] = {}
        for info in infos:
            if dialect.knows(info.name):
                stored = Stored(info.dtype, info.shape)
                self.tensors[dialect.to_native(info.name)] = kinds.setdefault(stored, stored)
        together: dict[str, list[str]] = {}
        for name in self.tensors:
            module = _module(name)
            if module is not None:
                together.setdefault(module, []).append(name)
        self._units = {module: Unit(module, frozenset(names)) for module, names in together.items() if len(names) > 1}

    def to_native(self, name: str) -> str:
        """The native name; a name that no dialect knows comes back as it is."""
        if name in self.tensors:  # a native name is one in every dialect
            return name
        native = self._read.get(name)
        if native is None:
            readings = [dialect.to_native(name) for dialect in self._dialects if dialect.knows(name)]
            native = next((reading for reading in readings if reading in self.tensors), None)
            if native is None:
                return readings[0] if readings else name
            self._read[name] = native
        return native

    def units(self, name: str, shared: Collection[str] = ()) -> tuple[Unit, ...]:
        """What a tensor has to come with.

        A quantised weight and its scales are a unit, of one expert or of a stack. So are the scales of w1 and w3 of one
        expert of which SGLang keeps one: those of activations, and `shared`, further roles.
        """
        unit = self._units.get(_module(name) or "")
        units = () if unit is None else (unit,)
        if (part := name.rpartition(".")[2]) not in shared and part not in ACTIVATION_SCALES:
            return units
        expert = expert_name(name)
        if expert is None or expert.is_shared or expert.projection not in GATE_AND_UP:
            return units
        both = frozenset(f"{expert.expert}.{projection}.{part}" for projection in GATE_AND_UP)
        return (*units, Unit(f"{expert.expert}.{part}", both)) if both <= self.tensors.keys() else units


def _module(name: str) -> str | None:
    """What a quantised weight and its scales share, or a stack of experts and its scales; None for another tensor."""
    module, _, leaf = name.rpartition(".")
    if role(leaf) in PAIRED:
        return module
    stack = stack_name(name)
    return None if stack is None else stack.module


class Units:
    """Which units a session has begun, and what each still lacks.

    shared: roles, beside those of activations, that w1 and w3 of an expert have to agree on.
    """

    def __init__(self, vocabulary: Vocabulary, shared: Collection[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._shared = shared
        self._open: dict[str, set[str]] = {}
        self._alone: set[str] = set()

    def add(self, name: str, *, alone: bool = False) -> bool:
        """A tensor has come. alone: it needs no partner, since it came unquantised.

        False for a scale whose weight came unquantised: nothing is to be done with it.
        """
        for unit, members in self._vocabulary.units(name, self._shared):
            if alone:
                self._alone.add(unit)
                self._open.pop(unit, None)
                continue
            if unit in self._alone:
                if not name.endswith(".weight"):
                    return False
                self._alone.discard(unit)
            lacking = self._open.get(unit)
            if lacking is None:
                lacking = self._open[unit] = set(members)
            lacking.discard(name)
            if not lacking:
                del self._open[unit]
        return True

    def reopen(self, names: Iterable[str]) -> None:
        """These have come and gone: all of each unit has to come again."""
        for name in names:
            for unit, members in self._vocabulary.units(name, self._shared):
                self._open[unit] = set(members)
                self._alone.discard(unit)

    def states(self, name: str) -> set[bool]:
        """Of the units that a tensor belongs to, whether they are complete: a set of the answers."""
        return {unit not in self._open for unit, _ in self._vocabulary.units(name, self._shared)}

    def copy(self) -> Units:
        """The same state, to try what a bucket would leave open."""
        other = Units(self._vocabulary, self._shared)
        other._open = {unit: set(lacking) for unit, lacking in self._open.items()}
        other._alone = set(self._alone)
        return other

    @property
    def lacking(self) -> Mapping[str, set[str]]:
        """Unit that is incomplete -> the native names that it still lacks."""
        return self._open

    def missing(self) -> list[str]:
        """Every native name that has to come yet."""
        return sorted(name for names in self._open.values() for name in names)

"""Rotary embedding in config.json: one reading of its three spellings.

The releases have `rope_theta`, `compress_rope_theta` and `rope_scaling`; transformers 5 saves `rope_parameters` with
entries `main` and `compress`, or one flat object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.checkpoint.config_reader import MISSING, ConfigReader, spelled
from sglang_dsv4.checkpoint.config_values import MOST_POSITIONS, OBJECT, THETA, YARN, YARN_REQUIRED, or_null
from sglang_dsv4.errors import together

HEAD_DIM = 64
"""Columns of a head that rotate in every release; some configs leave it out."""

PLAIN_THETA = 10000
"""Of the sliding layers in every release; some configs leave it out."""

_NO_SCALING = ("rope_theta", "partial_rotary_factor", "attention_factor")
_NONE = ("default", None)


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """head_dim: columns that rotate. theta: base of sliding layers; of others compress_theta, with scaling (yarn)."""

    head_dim: int
    theta: float
    compress_theta: float | None
    scaling: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Place:
    """An object of the file that says how one kind of layer rotates: its path, and its keys."""

    path: str
    values: Mapping[str, Any]


def read_rope(reader: ConfigReader, whole_head: int, *, compressed: bool) -> RopeFacts:
    """Raises ConfigError for values that no rotary cache can be built from, and for two that contradict each other.

    whole_head: columns of a head. compressed: whether the model is V4 with compressed layers, for which SGLang needs
    YaRN's numbers.
    """
    parameters = reader.take("rope_parameters", OBJECT, None) or {}
    nested = bool({"main", "compress"} & parameters.keys())
    main, compress = (_place(reader, parameters, name if nested else "") for name in ("main", "compress"))
    older = _Place("rope_scaling", reader.take("rope_scaling", or_null(OBJECT), None) or {})
    place = compress if parameters else older
    scaling = _scaling(reader, place, older, compressed)
    facts = RopeFacts(
        head_dim=_head_dim(reader, whole_head),
        # A flat section, and the older one, have SGLang take the base of the sliding layers from it.
        theta=_theta(reader, "rope_theta", [older, main], PLAIN_THETA),
        compress_theta=_theta(
            reader, "compress_rope_theta", [compress] if nested else [], MISSING if compressed else None
        ),
        scaling=scaling,
    )
    positions = (scaling or {}).get("factor", 1) * (scaling or {}).get("original_max_position_embeddings", 1)
    if positions > MOST_POSITIONS:
        reader.fail(f"{place.path}.factor", f"{positions} positions in all", f"at most {MOST_POSITIONS}")
    return facts


def _place(reader: ConfigReader, parameters: dict[str, Any], name: str) -> _Place:
    """An entry of `rope_parameters`, or the whole of it."""
    values = parameters.get(name, {}) if name else parameters
    path = f"rope_parameters.{name}" if name else "rope_parameters"
    if not isinstance(values, dict):
        reader.fail(path, values, OBJECT.expected)
    return _Place(path, values)


def _theta(reader: ConfigReader, key: str, places: list[_Place], default: Any) -> Any:
    """The one base that `key` and the `rope_theta` of `places` agree on; `default` where none of them has one."""
    path, found = key, reader.take(key, THETA, None)
    for place in places:
        other = place.values.get("rope_theta")
        if other is None:
            continue
        where = f"{place.path}.rope_theta"
        if not THETA.holds(other):
            reader.fail(where, other, THETA.expected)
        if found is not None and other != found:
            reader.fail(where, other, f"{spelled(found)}, as {path} says")
        path, found = where, other
    return reader.take(key, THETA, default) if found is None else found


def _scaling(reader: ConfigReader, place: _Place, older: _Place, compressed: bool) -> Mapping[str, Any] | None:
    """YaRN's numbers as `rope_scaling` has them; None where nothing is scaled."""
    newer = place is not older
    kind = place.values.get("rope_type", place.values.get("type"))
    if newer and kind in _NONE:
        values: dict[str, Any] = {}
    else:
        values = {key: item for key, item in place.values.items() if not newer or key not in _NO_SCALING}
    if newer:
        _same(reader, place, values, older)
    errors = reader.errors(values, YARN, YARN_REQUIRED if compressed else (), place.path)
    if errors:
        raise together(errors)
    if not newer or not values:
        return values or None
    return {"type": kind, **{key: item for key, item in values.items() if key != "rope_type"}}


def _same(reader: ConfigReader, place: _Place, values: Mapping[str, Any], older: _Place) -> None:
    """ConfigError where `rope_scaling` stands there too, and says otherwise."""
    for key, other in older.values.items():
        if key in values and values[key] != other:
            reader.fail(f"{place.path}.{key}", values[key], f"{spelled(other)}, as rope_scaling says")


def _head_dim(reader: ConfigReader, whole_head: int) -> int:
    found = reader.values.get("qk_rope_head_dim")
    if found is None:
        factor = reader.values.get("partial_rotary_factor")
        found = HEAD_DIM if factor is None else int(factor * whole_head)
    if found % 2 or not 0 < found <= whole_head:
        reader.fail("qk_rope_head_dim", found, f"an even part of head_dim, which is {whole_head}")
    return found

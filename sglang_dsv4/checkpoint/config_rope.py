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
    """Raises ConfigError for values that no rotary cache can be built from.

    whole_head: columns of a head. compressed: whether the model is V4 with compressed layers, for which SGLang needs
    YaRN's numbers.
    """
    main, compress = _places(reader)
    scaling = _scaling(reader, compress, compressed)
    facts = RopeFacts(
        head_dim=_head_dim(reader, whole_head),
        theta=_theta(reader, main, "rope_theta", PLAIN_THETA),
        compress_theta=_theta(reader, compress, "compress_rope_theta", MISSING if compressed else None),
        scaling=scaling,
    )
    positions = (scaling or {}).get("factor", 1) * (scaling or {}).get("original_max_position_embeddings", 1)
    if positions > MOST_POSITIONS:
        reader.fail(f"{compress.path}.factor", f"{positions} positions in all", f"at most {MOST_POSITIONS}")
    return facts


def _places(reader: ConfigReader) -> tuple[_Place, _Place]:
    """Where the file tells of sliding layers and of compressed ones."""
    parameters = reader.take("rope_parameters", OBJECT, None)
    if not parameters:
        return _Place("", {}), _Place("rope_scaling", reader.take("rope_scaling", or_null(OBJECT), None) or {})
    places = {}
    for name in ("main", "compress"):
        values = parameters.get(name, {} if name == "main" else parameters)
        path = f"rope_parameters.{name}" if name in parameters else "rope_parameters"
        if not isinstance(values, dict):
            reader.fail(path, values, OBJECT.expected)
        places[name] = _Place(path, values)
    return places["main"], places["compress"]


def _theta(reader: ConfigReader, place: _Place, released: str, default: Any) -> Any:
    """The base: of `place`, else of the key that the releases have."""
    if place.path.startswith("rope_parameters") and place.values.get("rope_theta") is not None:
        found = place.values["rope_theta"]
        if not THETA.holds(found):
            reader.fail(f"{place.path}.rope_theta", found, THETA.expected)
        return found
    return reader.take(released, THETA, default)


def _scaling(reader: ConfigReader, place: _Place, compressed: bool) -> Mapping[str, Any] | None:
    """YaRN's numbers as `rope_scaling` has them; None where nothing is scaled."""
    newer = place.path.startswith("rope_parameters")
    kind = place.values.get("rope_type", place.values.get("type"))
    if newer and kind in _NONE:
        values: dict[str, Any] = {}
    else:
        values = {key: item for key, item in place.values.items() if not newer or key not in _NO_SCALING}
    if newer:
        _same(reader, place, values)
    errors = reader.errors(values, YARN, YARN_REQUIRED if compressed else (), place.path)
    if errors:
        raise together(errors)
    if not newer or not values:
        return values or None
    return {"type": kind, **{key: item for key, item in values.items() if key != "rope_type"}}


def _same(reader: ConfigReader, place: _Place, values: Mapping[str, Any]) -> None:
    """ConfigError where `rope_scaling` stands there too, and says otherwise."""
    for key, other in (reader.take("rope_scaling", or_null(OBJECT), None) or {}).items():
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

"""How a linear can be stored: which tensors stand beside each other, in which dtypes and shapes.

A format is told by the whole set of siblings, never by the weight's dtype alone: `U8` weights are MXFP4 beside an E8M0
scale, ModelOpt's NVFP4 beside `weight_scale_2`, and Quark's MXFP4 beside a `U8` scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

SCALE_SUFFIXES = ("scale", "weight_scale", "weight_scale_inv")
"""Spellings of one thing: the multiplier of a block, `_inv` included."""

SUFFIXES = frozenset(
    (
        *("weight", "bias", *SCALE_SUFFIXES, "weight_scale_2", "input_scale"),
        *("weight_packed", "weight_global_scale", "input_global_scale", "weight_shape", "weight_zero_point"),
        *("weight_g_idx", "qweight", "qzeros", "scales", "g_idx"),
    )
)
"""Every last part of a linear's tensor names in any known dialect."""


class Format(Enum):
    """How the weight of a linear, or of a model's routed experts, is stored."""

    BF16 = "BF16"
    FP8 = "FP8"  # E4M3 with one scale per block, E8M0 or float
    FP4 = "FP4"  # E2M1 packed in bytes, E8M0 scale per 32 columns (MXFP4)
    QUARK_FP4 = "Quark MXFP4"  # the same numbers, scale bytes labelled U8
    NVFP4 = "NVFP4 (ModelOpt)"  # E2M1, E4M3 scale per 16 columns, times weight_scale_2
    NVFP4_CT = "NVFP4 (compressed-tensors)"  # the same, divided by weight_global_scale
    MXFP4_CT = "MXFP4 (compressed-tensors)"
    W4A16 = "W4A16 (compressed-tensors)"
    GPTQ = "W4A16 (GPTQ/AutoRound)"
    W4AFP8 = "W4AFP8"
    UNKNOWN = "unknown"  # siblings or dtypes that fit no rule


class Rule(NamedTuple):
    """One row: dtypes by role, roles that may also be there, and the columns that one weight and one scale entry cover.

    `per_weight` is None where the shape is transposed or unknown to us; `per_scale` is 0 for a square block.
    """

    format: Format
    needs: Mapping[str, frozenset[str]]
    may: frozenset[str] = frozenset()
    per_weight: int | None = 1
    per_scale: int | None = None


def _needs(**roles: str) -> dict[str, frozenset[str]]:
    return {role: frozenset(dtypes.split()) for role, dtypes in roles.items()}


FLOATS = ("BF16", "F16", "F32")
_FLOATS = " ".join(FLOATS)
_BYTES = "I8 U8"

RULES = (
    Rule(Format.BF16, _needs(weight=_FLOATS), frozenset({"scale"})),  # some quantisers leave a scale behind
    Rule(Format.FP8, _needs(weight="F8_E4M3", scale=f"F8_E8M0 {_FLOATS}"), frozenset({"input_scale"}), 1, 0),
    Rule(Format.FP4, _needs(weight=_BYTES, scale="F8_E8M0"), frozenset(), 2, 32),
    Rule(Format.FP4, _needs(weight="F4", scale="F8_E8M0 U8"), frozenset(), 1, 32),  # F4 shapes count elements
    Rule(Format.QUARK_FP4, _needs(weight=_BYTES, scale="U8"), frozenset({"input_scale"}), 2, 32),
    Rule(Format.NVFP4, _needs(weight=_BYTES, scale="F8_E4M3", weight_scale_2="F32"), frozenset({"input_scale"}), 2, 16),
    Rule(
        Format.NVFP4_CT,
        _needs(weight_packed="U8", scale="F8_E4M3", weight_global_scale="F32"),
        frozenset({"input_global_scale"}),
        2,
        16,
    ),
    Rule(Format.MXFP4_CT, _needs(weight_packed="U8", scale="U8 F8_E8M0"), frozenset(), 2, 32),
    Rule(
        Format.W4A16,
        _needs(weight_packed="I32", scale=_FLOATS),
        frozenset({"weight_shape", "weight_zero_point", "weight_g_idx"}),
        8,
        None,
    ),
    Rule(Format.GPTQ, _needs(qweight="I32", qzeros="I32", scales=_FLOATS), frozenset({"g_idx"}), None, None),
    Rule(Format.W4AFP8, _needs(weight="I8", scale=_FLOATS), frozenset({"input_scale"}), 2, None),
)


def role(suffix: str) -> str:
    """What a tensor is to its module: its last name part, with the three spellings of a scale made one."""
    return "scale" if suffix in SCALE_SUFFIXES else suffix


def classify(dtypes: Mapping[str, str]) -> Rule | None:
    """The rule that fits the tensors of one module, given as role -> dtype label; None when there is none."""
    present = {name for name in dtypes if name != "bias"}
    for rule in RULES:
        if rule.needs.keys() <= present <= rule.needs.keys() | rule.may and all(
            dtypes[name] in allowed for name, allowed in rule.needs.items()
        ):
            return rule
    return None


def lacking(dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """The roles that the tensors of one module, given as for `classify`, lack until some rule fits them: the fewest.

    Empty when nothing is lacking, and when no further tensor would help.
    """
    present = dtypes.keys() - {"bias"}
    lacks = [
        tuple(name for name in rule.needs if name not in present)
        for rule in RULES
        if present <= rule.needs.keys() | rule.may
        and all(dtypes[name] in allowed for name, allowed in rule.needs.items() if name in present)
    ]
    return min(lacks, key=len, default=())


def weight_role(rule: Rule) -> str:
    """Which role holds the packed weight."""
    return next(iter(rule.needs))


def shape_faults(
    rule: Rule, shapes: Mapping[str, tuple[int, ...]], logical: tuple[int, ...], block: tuple[int, int]
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(role, found, expected) of each tensor of a module whose shape does not fit a `logical` [out, in] weight.

    `block` is the FP8 block, (rows, columns). Scales of ragged blocks round up; packed formats must divide.
    """
    out, inn = logical
    expected: dict[str, tuple[int, ...]] = {}
    if rule.per_weight:
        expected[weight_role(rule)] = (out, inn // rule.per_weight)
    if rule.per_scale == 0:
        expected["scale"] = (-(-out // block[0]), -(-inn // block[1]))
    elif rule.per_scale:
        expected["scale"] = (out, inn // rule.per_scale)
    faults = [(name, shapes[name], want) for name, want in expected.items() if shapes[name] != want]
    scalars = ("weight_scale_2", "weight_global_scale", "input_global_scale", "input_scale")
    faults += [(name, shapes[name], (1,)) for name in scalars if name in shapes and shapes[name] not in ((), (1,))]
    return faults


def square_blocks(weight: tuple[int, ...], scale: tuple[int, ...]) -> set[int]:
    """Edge lengths (16 to 256) of square blocks that explain a scale's shape beside its weight's."""
    if len(weight) != 2 or len(scale) != 2:
        return set()
    return {
        edge
        for edge in (16, 32, 64, 128, 256)
        if all(-(-n // edge) == blocks for n, blocks in zip(weight, scale, strict=True))
    }

"""What a rank has to hold of every parameter before SGLang's post-processing, read from the file alone, in numpy.

Written from the format facts and SGLang's parameter names; shares nothing with the package. Unlike expected.py it knows
the orders, paddings and dtypes that devices and runners bring.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import formats
import numpy as np
import shards
from fake_device_values import PER_TENSOR, Expert, Grid, covered, files, held, nearest_bf16, plain

NOT_COMPARED: tuple[tuple[str, str], ...] = (
    (r"\.[kv]_scale$", "KV cache scales with a default of 1"),
    (r"_blockscale_swizzled$", "scratch that post-processing fills"),
    (r"\.engram\.embed\.", "V4.1's tables, cut by rows of their own; tests/loading loads them"),
)
"""Expression for a parameter's name -> why it is not compared."""

LENT_TO_NEXTN = ("model.embed_tokens.weight", "lm_head.weight")
"""Parameters that NextN shares with the target once both are loaded."""

ROOTS = ((r"^model\.layers\.", "layers."), (r"^model\.decoder\.", "mtp.0."), (r"^stages\.", "mtp."))
PARTS = (
    (".self_attn.", ".attn."),
    (".mlp.", ".ffn."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".gate.e_score_correction_bias", ".gate.bias"),
    (".topk.tid2eid", ".gate.tid2eid"),
    (".weight_scale_inv", ".scale"),
)
TOP = {
    "target": {"model.embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight"},
    "nextn": {"model.shared_head.norm.weight": "mtp.0.norm.weight"},
    "dspark": {},
}
TOP_ROOT = {"target": "", "nextn": "mtp.0.", "dspark": ""}
FUSED = {
    ".wqkv_a.": (".wq_a.", ".wkv."),
    ".wkv_gate.": (".wkv.", ".wgate."),
    ".gate_up_proj.": (".w1.", ".w3."),
    ".down_proj.": (".w2.",),
}
"""Part of a parameter's name -> those of the tensors that lie in it, one above the other."""

EXPERT = re.compile(r"^(?P<module>.*\.mlp\.experts)\.(?P<fused>w13|w2)_(?P<leaf>.*)$")
PROJECTIONS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass(frozen=True)
class Model:
    """What was loaded: a folder, as which class ("target", "nextn", "dspark"), and how its experts lie in the buffers.

    up_first: w3 above w1. converted: packed FP4 experts are held as FP8.
    """

    folder: str
    kind: str = "target"
    up_first: bool = False
    converted: bool = False


@dataclass(frozen=True)
class Found:
    """The comparison of one rank. faults: what differs. compared: parameters that were. left: name -> why not."""

    faults: list[str]
    compared: int
    left: dict[str, str]


def compare(model: Model, grid: Grid, parameters: dict[str, Any]) -> Found:
    """Every parameter of one rank against the file."""
    faults: list[str] = []
    left: dict[str, str] = {}
    names = set(parameters)
    for name in sorted(names):
        why = next((why for pattern, why in NOT_COMPARED if re.search(pattern, name)), "")
        if model.kind == "nextn" and name in LENT_TO_NEXTN:
            why = "the target's, lent after the load"
        if why:
            left[name] = why
        elif (expert := EXPERT.match(name)) is not None:
            if not (model.converted and expert["leaf"] == "weight_scale_inv"):  # looked at with its weight
                faults += _experts(model, grid, name, expert, parameters)
        else:
            faults += _dense(model, grid, name, parameters[name])
    return Found(faults, len(names) - len(left), left)


def _experts(model: Model, grid: Grid, name: str, expert: re.Match, parameters: dict[str, Any]) -> Iterator[str]:
    """One parameter of routed experts, and of the shared one where it lies behind them."""
    stored = files(model.folder)
    (module,) = native_names(model.kind, f"{expert['module']}.")
    module = module.removesuffix(".")
    routed = len({found[1] for found in map(re.compile(rf"{re.escape(module)}\.(\d+)\.").match, stored) if found})
    local = routed // grid.ep
    first = grid.rank // grid.moe_tp * local
    value = held(parameters[name])
    scale = held(parameters[f"{name}_scale_inv"]) if model.converted else None
    everyone = expert["leaf"] == "input_scale"
    for slot in range(len(value)):
        routed_here = slot < (routed if everyone else local)
        source = f"{module}.{slot if everyone else first + slot}" if routed_here else _shared(module)
        for projection in PROJECTIONS[expert["fused"]]:
            part = _projection(model, value[slot], projection, expert["leaf"])
            one = Expert(stored, f"{source}.{projection}", projection)
            if scale is not None:
                problem = one.values(grid, part, _projection(model, scale[slot], projection, "scale"))
            elif not routed_here and _is_packed(stored, module):
                if expert["leaf"] != "weight":
                    continue  # looked at with its weight
                factor = held(parameters[f"{name}_scale_inv"])[slot]
                problem = one.nearly(grid, part, _projection(model, factor, projection, "scale"))
            else:
                problem = one.bits(grid, part, expert["leaf"])
            if problem:
                yield f"{name}[{slot}] {projection}: {problem}"


def _shared(module: str) -> str:
    return module.removesuffix(".experts") + ".shared_experts"


def _is_packed(stored: shards.Shard, module: str) -> bool:
    return stored[f"{module}.0.w1.weight"].dtype in ("I8", "U8")


def _projection(model: Model, value: np.ndarray, projection: str, leaf: str) -> np.ndarray:
    """One projection of one expert's slot: the upper or lower half of w13, all of w2."""
    if projection == "w2":
        return value
    lower = (projection == "w3") != (model.up_first and leaf not in PER_TENSOR)
    return value[int(lower)] if leaf in PER_TENSOR else np.split(value, 2)[lower]


DENSE_CUTS = (
    (r"\.attn\.(wq_b|wo_a)\.", 0),
    (r"\.attn\.wo_b\.", 1),
    (r"\.shared_experts\.w[13]\.", 0),
    (r"\.shared_experts\.w2\.", 1),
)
"""Native name -> the axis that tensor parallelism cuts; what is not listed is whole on every rank."""
VOCABULARY = ("embed.weight", "head.weight", ".markov_w1.weight")
OVERLAPPING = 4
"""Rows of `ape` in a compressor whose windows overlap: its weight loader puts the right half below the left."""


def native_names(kind: str, name: str) -> list[str]:
    """The tensors of the file that lie in a parameter beside the routed experts, top to bottom."""
    if name in TOP[kind]:
        return [TOP[kind][name]]
    native = name
    for pattern, root in ROOTS:
        native = re.sub(pattern, root, native)
    native = re.sub(r"^model\.", TOP_ROOT[kind], native)
    for ours, theirs in PARTS:
        native = native.replace(ours, theirs)
    for fused, parts in FUSED.items():
        if fused in native:
            return [native.replace(fused, part) for part in parts]
    return [native]


def _dense(model: Model, grid: Grid, name: str, parameter: Any) -> Iterator[str]:
    """A parameter beside the routed experts. NaN in what is expected stands for any number."""
    stored = files(model.folder)
    natives = native_names(model.kind, name)
    if natives[0] not in stored:  # DSpark keeps what only its last stage has outside the stages
        natives = [next((known for known in stored if known.endswith(f".{native}")), native) for native in natives]
    if natives[0] not in stored:
        yield f"{name}: no {natives[0]} in the file"
        return
    value = held(parameter)
    mine = np.concatenate([_cut(model, grid, native, value, len(natives), parameter) for native in natives])
    if value.shape != mine.shape:
        yield f"{name}: shape {value.shape} for {mine.shape}"
    else:
        right = np.isfinite(value) if mine.dtype.kind == "f" else np.ones(mine.shape, bool)
        right &= (value == mine) | np.isnan(mine)
        if not right.all():
            yield f"{name}: {np.count_nonzero(~right)} of {value.size} differ"


def _cut(model: Model, grid: Grid, native: str, value: np.ndarray, parts: int, parameter: Any) -> np.ndarray:
    """This rank's part of one stored tensor, as the parameter's dtype holds it."""
    stored = files(model.folder)
    whole = plain(stored[native])
    if stored[native].dtype == "F8_E4M3" and parameter.element_size() > 1:  # expanded while it loads
        whole = formats.dequantized(whole, plain(stored[native.replace(".weight", ".scale")]), packed=False)
    if stored[native].dtype == "F32" and parameter.element_size() == 2:  # AITER keeps the gate's bias in BF16
        whole = nearest_bf16(whole)
    if native.endswith(".ape") and len(whole) == OVERLAPPING:
        return np.concatenate(np.split(whole, 2, -1)).reshape(whole.shape)
    if native.endswith(VOCABULARY):
        rows = value.shape[0]
        start = grid.rank * rows if rows < -(-whole.shape[0] // 64) * 64 else 0
        return _filled(whole[start : start + rows], rows, 0)
    for pattern, axis in DENSE_CUTS:
        if re.search(pattern, native):
            shared = ".shared_experts." in native
            length = value.shape[axis] // (parts if axis == 0 else 1)
            if shared:
                width = stored[f"{native.rpartition('.shared_experts.')[0]}.shared_experts.w1.weight"].shape[0]
                start, each = grid.share(width, shared=True)
                entry = covered(width, whole.shape[axis])
                start, length = start // entry, -(-each // entry)
            else:
                start = grid.rank * length
            part = whole[start : start + length] if axis == 0 else whole[:, start : start + length]
            return _filled(part, length, axis, np.nan if native.endswith(".scale") else 0)
    return whole


def _filled(part: np.ndarray, length: int, axis: int, filler: float = 0) -> np.ndarray:
    """Followed by `filler` up to `length`; NaN stands for any number, which is what a scale of zeros may be."""
    short = [(0, length - part.shape[axis]) if axis == number else (0, 0) for number in range(part.ndim)]
    return np.pad(part, short, constant_values=filler)

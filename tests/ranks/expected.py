"""What every parameter of a rank must hold, read from a native checkpoint by numpy alone.

Shares nothing with the package: the formats are formats.py's, the files shards.py's, the names and the transforms those
of SGLang's module trees (srt.models.deepseek_v4, deepseek_v4_nextn, deepseek_v4_dspark), the cuts grids.py's. Every
parameter that a model has is expected here, or listed in `NOT_COMPARED` with the reason.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import formats
import numpy as np
import shards
from grids import Grid, Place, Share
from loads import Parameter

BLOCK = 128
"""Rows and columns of one FP8 scale."""

NOT_COMPARED = {
    ".k_scale": "no checkpoint has one; SGLang's default",
    ".v_scale": "no checkpoint has one; SGLang's default",
    "blockscale_swizzled": "scratch of NVFP4 post-processing, which wants a GPU",
}
NOT_COMPARED_NEXTN = {
    "model.embed_tokens.weight": "lent by the target after the load",
    "lm_head.weight": "lent by the target after the load",
}
"""Part of a name -> why nothing is expected of it."""


@dataclass(frozen=True)
class Converted:
    """A block-FP8 weight and its scale that need not be these bytes, but these values, each in one legal form.

    values: float64, experts x rows x columns. scale: the name of the parameter with its scales.
    """

    values: np.ndarray
    scale: str


@dataclass(frozen=True)
class ScalesOf:
    """The scales of a `Converted` weight, compared with it. shape: theirs."""

    shape: tuple[int, ...]


Expected = Parameter | Converted | ScalesOf
Named = Iterator[tuple[str, Expected]]

UNSIGNED = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "I32": np.uint32, "I64": np.uint64}
DTYPES = {
    "BF16": "bfloat16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "U8": "uint8",
}


@dataclass(frozen=True)
class Reading:
    """One native checkpoint folder, and how a server is to hold it.

    keeps_wo_a: in FP8 (SGLANG_OPT_FP8_WO_A_GEMM=1), target and NextN. dequant: packed FP4 experts as FP8.
    """

    folder: Path
    keeps_wo_a: bool = False
    dequant: bool = False

    @cached_property
    def files(self) -> shards.Shard:
        return shards.tensors(self.folder)

    @cached_property
    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text())

    def parameters(self, part: str, grid: Grid, rank: int) -> dict[str, Expected]:
        """Name -> what a rank holds of "target", "nextn" or "dspark"."""
        place = grid.at(rank)
        found = list({"target": self._target, "nextn": self._nextn, "dspark": self._dspark}[part](place))
        named = dict(found)
        assert len(named) == len(found), "two expectations of one parameter"
        return named

    # --- the three models ---------------------------------------------------------------------------------------------

    def _target(self, place: Place) -> Named:
        layers = self.config["num_hidden_layers"]
        for number in range(layers)[Share(place.stage, place.stages).cut(layers)]:
            yield from self._layer(f"layers.{number}", f"model.layers.{number}", place, fuses_qkv=True)
        if place.stage == 0:
            yield "model.embed_tokens.weight", self._vocabulary("embed.weight", place.vocabulary)
        if place.stage == place.stages - 1:
            yield "model.norm.weight", self._plain("norm.weight")
            yield "lm_head.weight", self._vocabulary("head.weight", place.dense)
            yield from self._hyper_connections("", "model", ("head",))

    def _nextn(self, place: Place) -> Named:
        yield from self._layer("mtp.0", "model.decoder", place, fuses_qkv=True)
        yield from self._hyper_connections("mtp.0.", "model", ("head",))
        yield "model.shared_head.norm.weight", self._plain("mtp.0.norm.weight")
        for name in ("enorm", "hnorm"):
            yield f"model.{name}.weight", self._plain(f"mtp.0.{name}.weight")
        for name in ("e_proj", "h_proj"):
            yield from self._linear(f"model.{name}", [f"mtp.0.{name}"])

    def _dspark(self, place: Place) -> Named:
        last = max(int(name.split(".")[1]) for name in self.files if name.startswith("mtp."))
        for stage in range(last + 1):
            yield from self._layer(f"mtp.{stage}", f"stages.{stage}", place, fuses_qkv=False, keeps_wo_a=False)
        yield from self._linear("stages.0.main_proj", ["mtp.0.main_proj"])
        yield "stages.0.main_norm.weight", self._plain("mtp.0.main_norm.weight")
        yield f"stages.{last}.norm.weight", self._plain(f"mtp.{last}.norm.weight")
        yield from self._hyper_connections(f"mtp.{last}.", f"stages.{last}", ("head",))
        markov = f"mtp.{last}.markov_head"
        yield "markov_head.markov_w1.weight", self._vocabulary(f"{markov}.markov_w1.weight", Share(0, 1))
        yield "markov_head.markov_w2.weight", self._plain(f"{markov}.markov_w2.weight")

    # --- one layer ----------------------------------------------------------------------------------------------------

    def _layer(
        self, native: str, module: str, place: Place, *, fuses_qkv: bool, keeps_wo_a: bool | None = None
    ) -> Named:
        yield from self._hyper_connections(f"{native}.", module, ("attn", "ffn"))
        yield f"{module}.input_layernorm.weight", self._plain(f"{native}.attn_norm.weight")
        yield f"{module}.post_attention_layernorm.weight", self._plain(f"{native}.ffn_norm.weight")
        keeps = self.keeps_wo_a if keeps_wo_a is None else keeps_wo_a
        yield from self._attention(f"{native}.attn", f"{module}.self_attn", place.attention, fuses_qkv, keeps)
        yield from self._router(f"{native}.ffn.gate", f"{module}.mlp")
        yield from self._shared_expert(f"{native}.ffn.shared_experts", f"{module}.mlp.shared_experts", place.dense)
        yield from self._experts(f"{native}.ffn.experts", f"{module}.mlp.experts", place)

    def _hyper_connections(self, native: str, module: str, which: tuple[str, ...]) -> Named:
        for name in (f"hc_{part}_{leaf}" for part in which for leaf in ("fn", "base", "scale")):
            yield f"{module}.{name}", self._plain(f"{native}{name}")

    def _attention(self, native: str, module: str, share: Share, fuses_qkv: bool, keeps_wo_a: bool) -> Named:
        yield f"{module}.attn_sink", self._plain(f"{native}.attn_sink")
        for name in ("q_norm", "kv_norm"):
            yield f"{module}.{name}.weight", self._plain(f"{native}.{name}.weight")
        if fuses_qkv:
            yield from self._linear(f"{module}.wqkv_a", [f"{native}.wq_a", f"{native}.wkv"])
        else:
            for name in ("wq_a", "wkv"):
                yield from self._linear(f"{module}.{name}", [f"{native}.{name}"])
        yield from self._linear(f"{module}.wq_b", [f"{native}.wq_b"], rows=share)
        yield from self._linear(f"{module}.wo_b", [f"{native}.wo_b"], columns=share)
        yield from self._wo_a(f"{native}.wo_a", f"{module}.wo_a", share, keeps_wo_a)
        if f"{native}.compressor.ape" in self.files:
            yield from self._compressor(f"{native}.compressor", f"{module}.compressor")
        if f"{native}.indexer.wq_b.weight" in self.files:
            yield from self._linear(f"{module}.indexer.wq_b", [f"{native}.indexer.wq_b"])
            name = "indexer.weights_proj.weight"
            yield f"{module}.{name}", self._plain(f"{native}.{name}")
            yield from self._compressor(f"{native}.indexer.compressor", f"{module}.indexer.compressor")

    def _compressor(self, native: str, module: str) -> Named:
        yield f"{module}.norm.weight", as_float32(self._plain(f"{native}.norm.weight"))
        parts = [self._plain(f"{native}.{name}.weight").bits for name in ("wkv", "wgate")]
        yield f"{module}.wkv_gate.weight", Parameter("bfloat16", np.concatenate(parts))
        ape = self._plain(f"{native}.ape")
        ratio, width = ape.bits.shape
        if ratio == 4:  # the halves of each row lie one above the other, all left ones first
            left, right = np.split(ape.bits, 2, 1)
            ape = Parameter(ape.dtype, np.concatenate([left, right]).reshape(ratio, width))
        yield f"{module}.ape", ape

    def _wo_a(self, native: str, module: str, share: Share, kept: bool) -> Named:
        weight = self.files[f"{native}.weight"]
        rows = share.cut(weight.shape[0])
        if weight.dtype != "F8_E4M3":
            yield f"{module}.weight", self._plain(f"{native}.weight", rows=share)
        elif not kept:
            values = formats.dequantized(weight.codes, self._scale_values(native), packed=False)
            yield f"{module}.weight", Parameter("bfloat16", as_bfloat16(values)[rows])
        else:
            yield f"{module}.weight", self._plain(f"{native}.weight", rows=share)
            scale = self._scale(native).bits
            groups = self.config["o_groups"] // share.of
            cut = scale[share.cut(len(scale))]
            yield f"{module}.weight_scale_inv", Parameter("float32", cut.reshape(groups, -1, scale.shape[1]))

    def _router(self, native: str, module: str) -> Named:
        yield f"{module}.gate.weight", self._plain(f"{native}.weight")
        if f"{native}.tid2eid" in self.files:
            experts = raw(self.files[f"{native}.tid2eid"]).astype(np.uint32)
            yield f"{module}.topk.tid2eid", Parameter("int32", experts)
        else:
            yield f"{module}.gate.e_score_correction_bias", self._plain(f"{native}.bias")

    def _shared_expert(self, native: str, module: str, share: Share) -> Named:
        yield from self._linear(f"{module}.gate_up_proj", [f"{native}.w1", f"{native}.w3"], rows=share)
        yield from self._linear(f"{module}.down_proj", [f"{native}.w2"], columns=share)

    # --- linears ------------------------------------------------------------------------------------------------------

    def _linear(self, module: str, native: list[str], rows: Share | None = None, columns: Share | None = None) -> Named:
        """Linears of one input, this rank's rows (or columns) of each, one below the other; scales like the weights."""
        weights = [self._plain(f"{name}.weight", rows, columns) for name in native]
        yield f"{module}.weight", stacked(weights)
        if weights[0].dtype == "float8_e4m3fn":
            scales = [self._scale(name, rows, columns) for name in native]
            yield f"{module}.weight_scale_inv", stacked(scales)

    def _plain(self, name: str, rows: Share | None = None, columns: Share | None = None) -> Parameter:
        tensor = self.files[name]
        return Parameter(DTYPES[tensor.dtype], part(raw(tensor), rows, columns))

    def _scale(self, module: str, rows: Share | None = None, columns: Share | None = None) -> Parameter:
        """The block scales of a linear as float32, which is how SGLang holds them."""
        tensor = self.files[f"{module}.scale"]
        bits = raw(tensor)
        if tensor.dtype == "F8_E8M0":
            bits = e8m0_as_float32(bits)
        return Parameter("float32", part(bits, rows, columns))

    def _scale_values(self, module: str) -> np.ndarray:
        return self._scale(module).bits.view(np.float32).astype(np.float64)

    def _vocabulary(self, name: str, share: Share) -> Parameter:
        """Rows of the vocabulary, which is filled up with zero rows to a multiple of 64 that all ranks can share."""
        whole = self._plain(name)
        multiple = 64 if -(-len(whole.bits) // 64) * 64 % share.of == 0 else 64 * share.of
        padding = -len(whole.bits) % multiple
        filled = np.pad(whole.bits, ((0, padding), (0, 0)))
        return Parameter(whole.dtype, filled[share.cut(len(filled))])

    # --- routed experts -----------------------------------------------------------------------------------------------

    def _experts(self, native: str, module: str, place: Place) -> Named:
        everyone = range(self._number_of_experts(native))
        mine = everyone[place.experts.cut(len(everyone))]
        for fused, projections in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            share = place.expert_width
            cut = {"rows": share} if fused == "w13" else {"columns": share}

            def stack(of: Callable[[str], np.ndarray], numbers: range = mine, parts=projections) -> np.ndarray:
                return np.stack([np.concatenate([of(f"{native}.{n}.{p}") for p in parts]) for n in numbers])

            dtype = self.files[f"{native}.0.{projections[0]}.weight"].dtype
            if dtype == "I8" and self.dequant:
                yield from self._converted(f"{module}.{fused}", stack(lambda name: part(self._fp4(name), **cut)))  # noqa: B023
                continue
            weights = stack(lambda name: self._plain(f"{name}.weight", **cut).bits)  # noqa: B023
            yield f"{module}.{fused}_weight", Parameter(DTYPES[dtype], weights)
            if dtype in ("I8", "F8_E4M3"):
                scales = stack(lambda name: self._scale(name, **cut).bits)  # noqa: B023
                yield f"{module}.{fused}_weight_scale_inv", Parameter("float32", scales)
            elif dtype == "U8":
                scales = stack(lambda name: self._plain(f"{name}.weight_scale", **cut).bits)  # noqa: B023
                yield f"{module}.{fused}_weight_scale", Parameter("float8_e4m3fn", scales)
                # SGLang takes the greatest input scale of all ranks' experts, so every rank holds them all
                for leaf, numbers in (("weight_scale_2", mine), ("input_scale", everyone)):
                    scalars = stack(lambda name: self._plain(f"{name}.{leaf}").bits.reshape(1), numbers)  # noqa: B023
                    shape = scalars.shape if fused == "w13" else scalars.shape[:1]
                    yield f"{module}.{fused}_{leaf}", Parameter("float32", scalars.reshape(shape))

    def _number_of_experts(self, native: str) -> int:
        return 1 + max(int(name.split(".")[4]) for name in self.files if name.startswith(f"{native}."))

    def _fp4(self, module: str) -> np.ndarray:
        weight = self.files[f"{module}.weight"]
        return formats.dequantized(weight.codes, self._scale_values(module), packed=True)

    def _converted(self, parameter: str, values: np.ndarray) -> Named:
        experts, rows, columns = values.shape
        scale = f"{parameter}_weight_scale_inv"
        yield f"{parameter}_weight", Converted(values, scale)
        yield scale, ScalesOf((experts, -(-rows // BLOCK), -(-columns // BLOCK)))


# --- bits -------------------------------------------------------------------------------------------------------------


def raw(tensor: shards.Tensor) -> np.ndarray:
    """The bytes of a stored tensor as unsigned integers of its element size, in its shape."""
    return np.frombuffer(tensor.data, UNSIGNED.get(tensor.dtype, np.uint8)).reshape(tensor.shape)


def part(bits: np.ndarray, rows: Share | None = None, columns: Share | None = None) -> np.ndarray:
    bits = bits if rows is None else bits[rows.cut(bits.shape[0])]
    return bits if columns is None else bits[:, columns.cut(bits.shape[1])]


def stacked(parts: list[Parameter]) -> Parameter:
    return Parameter(parts[0].dtype, np.concatenate([each.bits for each in parts]))


def as_float32(parameter: Parameter) -> Parameter:
    """BF16 as the float32 of the same value: its bits are the upper half."""
    assert parameter.dtype == "bfloat16"
    return Parameter("float32", parameter.bits.astype(np.uint32) << 16)


def e8m0_as_float32(codes: np.ndarray) -> np.ndarray:
    """2^(code - 127): the code is the exponent field. 0 would be subnormal and 255 is NaN: no test writes them."""
    assert codes.min() > 0
    assert codes.max() < 255
    return codes.astype(np.uint32) << 23


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest BF16 of each value, ties to even, by way of float32 (exact for an FP8 value and E8M0)."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

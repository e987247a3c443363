"""Where a native tensor name lives in each of the three module trees.

SGLang builds the target as `model.layers.N`, the NextN draft's one layer as `model.decoder` and DSpark's as
`stages.S` (srt/models/deepseek_v4.py, deepseek_v4_nextn.py, deepseek_v4_dspark.py of 0.5.23). A routed expert's w1 and
w3 share the parameter `experts.w13_*`, w2 is `experts.w2_*` (FusedMoE.make_expert_params_mapping).
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dsv4.checkpoint.expert_names import GATE_AND_UP, ExpertName
from sglang_dsv4.checkpoint.modules import OWN_VOCABULARY, ModelKind, VocabularyPart

MODULES = {"attn": "self_attn", "ffn": "mlp"}
"""Native path part -> module name of the two sub-layers."""

FUSED_EXPERTS = {"w13": GATE_AND_UP, "w2": ("w2",)}
"""Expert parameter -> the projections that it holds of each expert; a projection is also SGLang's shard id."""

FUSED = {
    "wq_a": "wqkv_a",
    "wkv": "wqkv_a",
    "compressor.wkv": "compressor.wkv_gate",
    "compressor.wgate": "compressor.wkv_gate",
    "shared_experts.w1": "shared_experts.gate_up_proj",
    "shared_experts.w3": "shared_experts.gate_up_proj",
    "shared_experts.w2": "shared_experts.down_proj",
}
"""Last parts of a native linear -> the module that holds it, where SGLang fuses two or names it otherwise."""

FUSED_ROWS = {"wqkv_a": ("wq_a", "wkv"), "wkv_gate": ("wkv", "wgate")}
"""Module that holds two native linears one above the other -> these, from the top."""

STACKED_SHARDS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
"""SGLang's names of w1 and w3 of a dense MLP -> the module that takes both, and as which of its matrices."""

BESIDE_THE_DECODER = {"e_proj": "model.e_proj", "h_proj": "model.h_proj"}
"""NextN's two projections -> their modules, one level above its layer."""

EXPERT_LEAVES = {"scale": "weight_scale_inv"}
"""Native leaf of an expert tensor -> parameter leaf; others keep their name."""


@dataclass(frozen=True)
class Wiring:
    """One of the three classes, as the loader sees it: the native root of its layers and where SGLang builds them."""

    kind: ModelKind
    native: str
    module: str
    embedding: str
    head: str = "lm_head"

    def path(self, native: str) -> str | None:
        """Module path of a tensor or module below a layer: "layers.3.attn.wo_a" -> "model.layers.3.self_attn.wo_a".

        None for what this class does not build as a layer (other roots, the embedding, the head).
        """
        root, *rest = native.split(".")
        if root != self.native or not rest or not rest[0].isdigit():
            return None
        return ".".join([self.module.format(rest[0]), *(MODULES.get(part, part) for part in rest[1:])])

    def holders(self, native: str) -> list[str]:
        """Modules that may hold a native linear: fused ones first, since the others then do not exist."""
        path = self.path(native)
        if path is None:
            return []
        ends = (part for part in FUSED if path.endswith(f".{part}"))
        fused = [path.removesuffix(part) + FUSED[part] for part in sorted(ends, key=len, reverse=True)[:1]]
        beside = BESIDE_THE_DECODER.get(native.rpartition(".")[2]) if self.kind == "nextn" else None
        return [*fused, path, *([beside] if beside else [])]

    def experts(self, layer: str) -> str:
        """Module path of the FusedMoE of a native layer: "layers.3" -> "model.layers.3.mlp.experts"."""
        return f"{self.path(layer)}.mlp.experts"

    def expert_parameter(self, expert: ExpertName) -> str:
        """The parameter that holds a routed expert's tensor, or the shared one's where it is fused with these."""
        fused = next(name for name, projections in FUSED_EXPERTS.items() if expert.projection in projections)
        return f"{self.experts(expert.layer)}.{fused}_{EXPERT_LEAVES.get(expert.leaf, expert.leaf)}"

    def vocabulary(self, native: str) -> str | None:
        """The parameter of a draft's own embedding or head: "mtp.0.head.weight" -> "lm_head.weight"; else None."""
        root, _, rest = native.removesuffix(".weight").partition(".")
        which = OWN_VOCABULARY.get(rest.partition(".")[2]) if root == self.native == "mtp" else None
        return None if which is None else self.vocabulary_parameter(which)

    def vocabulary_parameter(self, part: VocabularyPart) -> str:
        """The parameter that holds the embedding or the head: "head" -> "lm_head.weight"."""
        return f"{self.embedding if part == 'embed' else self.head}.weight"


TARGET = Wiring("target", "layers", "model.layers.{}", "model.embed_tokens")
NEXTN = Wiring("nextn", "mtp", "model.decoder", "model.embed_tokens")
DSPARK = Wiring("dspark", "mtp", "stages.{}", "embed_tokens")


def is_wo_a(name: str) -> bool:
    """Whether `name` is a tensor of a `wo_a` projection, by whole path parts."""
    parts = name.split(".")
    return len(parts) >= 2 and parts[-2] == "wo_a"

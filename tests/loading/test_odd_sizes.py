"""Sizes that do not end on a scale block: what passes is loaded right to the bit, what is refused would not have been.

The values that a file holds and those that a rank holds are laid out here from the block's edge alone, one scale for
128 rows and 128 columns of its own tensor.
"""

import json
import re
from dataclasses import replace
from unittest.mock import patch

import formats
import jobs
import numpy as np
import pytest
import shards
from test_check_and_load import both

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.make import Options, write_model
from sglang_dsv4.checkpoint.tiny.sources import Drawn

APART = {"SGLANG_OPT_FUSE_WQA_WKV": "0"}
WHOLE_SHARED = {"SGLANG_SHARED_EXPERT_TP1": "1"}
TP2 = ("--tp-size", "2")
EIGHT = ("--tp-size", "8", "--ep-size", "8", "--attn-dp-size", "8", "--arch", "sm90")
DSPARK = ("--speculative-algorithm", "DSPARK", "--enable-dp-lm-head")
HELD = {
    "target": ("model.layers.1", "layers.1", ("attn.indexer.wq_b",)),
    "mtp": ("model.decoder", "mtp.0", ()),
    "dspark": ("stages.0", "mtp.0", ("main_proj",)),
}
"""Which model -> its layer in SGLang and in the file, and the linears that only it has."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Makes a native checkpoint of two layers with a draft of either kind, of any sizes."""
    folder = tmp_path_factory.mktemp("odd")
    known = {}

    def make(draft="mtp", **sizes):
        key = f"{draft}-{sorted(sizes.items())}"
        if key not in known:
            config = native_config("tiny", draft, layers=2) | sizes
            known[key] = folder / str(len(known))
            write_model(known[key], Options(draft=draft), config, Drawn(0, config["n_routed_experts"]))
        return known[key]

    return make


def by_block(scale, shape):
    return scale.astype(np.float64).repeat(128, 0)[: shape[0]].repeat(128, 1)[:, : shape[1]]


def in_file(tensors, module):
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.scale"]
    assert (weight.dtype, scale.dtype) == ("F8_E4M3", "F8_E8M0")
    return formats.E4M3[weight.codes] * by_block(2.0 ** (scale.codes - 127.0), weight.shape)


def in_model(kept, module):
    weight = kept[f"{module}.weight"]
    if weight.dtype != np.uint8:  # BF16 by value: an FP8 code times a power of two
        return weight
    scale = kept[f"{module}.weight_scale_inv"]
    return formats.E4M3[weight] * by_block(scale.reshape(-1, scale.shape[-1]), weight.shape)


def wrong(kept, model, which, tp, rank):
    """Names of the linears of one layer that do not hold this rank's part of the file, after comparing every one."""
    tensors = shards.tensors(model)
    layer, native, more = HELD[which]
    attention, shared = f"{layer}.self_attn", f"{layer}.mlp.shared_experts"

    def part(place, axis):
        return np.split(in_file(tensors, f"{native}.{place}"), tp, axis)[rank]

    def whole(*places):
        return np.concatenate([in_file(tensors, f"{native}.{place}") for place in places])

    expected = {f"{attention}.wq_b": part("attn.wq_b", 0), f"{attention}.wo_a": part("attn.wo_a", 0)}
    expected |= {f"{attention}.wo_b": part("attn.wo_b", 1), f"{shared}.down_proj": part("ffn.shared_experts.w2", 1)}
    halves = [part(f"ffn.shared_experts.{projection}", 0) for projection in ("w1", "w3")]
    expected[f"{shared}.gate_up_proj"] = np.concatenate(halves)
    if f"{attention}.wqkv_a.weight" in kept:
        expected[f"{attention}.wqkv_a"] = whole("attn.wq_a", "attn.wkv")
    else:
        expected |= {f"{attention}.{name}": whole(f"attn.{name}") for name in ("wq_a", "wkv")}
    expected |= {f"{layer}.{place.replace('attn.', 'self_attn.')}": whole(place) for place in more}
    if which == "mtp":
        expected |= {f"model.{name}": whole(name) for name in ("e_proj", "h_proj")}
    return [name for name, values in expected.items() if not np.array_equal(in_model(kept, name), values)]


def arguments_of(which, arguments=()):
    return (*arguments, *(jobs.NEXTN if which == "mtp" else ()))


def loads_right(loader, model, which="target", arguments=(), flags=None, tp=1):
    for rank in range(tp):
        how = {"arguments": arguments_of(which, arguments), "flags": flags or {}, "tp_rank": rank, "keep": "."}
        kept = loader.load(model, draft=which != "target", **how).kept
        assert wrong(kept, model, which, tp, rank) == []


def unrefused(job):
    """A load in which no size is refused: what SGLang would have made of it."""
    with patch("sglang_dsv4.decisions.decide.parallel_refusals", return_value=[]) as asked:
        loaded = jobs.load(job)
    assert asked.called
    return loaded


FINE = [
    pytest.param({"hidden_size": 320}, (), id="hidden-320"),
    pytest.param({"index_n_heads": 3, "index_head_dim": 64}, (), id="index-3x64"),
    pytest.param({"o_lora_rank": 192}, (), id="o_lora-192"),
    pytest.param({"o_lora_rank": 64, "o_groups": 4}, TP2, id="o_lora-64-groups-4-tp2"),
    pytest.param({"head_dim": 576}, (), id="head_dim-576"),
    pytest.param({"moe_intermediate_size": 256, "n_shared_experts": 2}, TP2, id="two-shared-tp2"),
]


@pytest.mark.parametrize("which", HELD)
@pytest.mark.parametrize(("sizes", "arguments"), FINE)
def test_what_passes_loads_right(loader, odd, sizes, arguments, which):
    model = odd("dspark" if which == "dspark" else "mtp", **sizes)
    if which == "dspark":  # SGLang serves it on GPUs only, so it is no matter for `check` here
        assert both(loader, str(model), list(arguments), {}) == []
    else:
        assert both(loader, str(model), list(arguments_of(which, arguments)), {}, draft=which == "mtp") == []
    loads_right(loader, model, which, arguments, tp=2 if arguments else 1)


@pytest.mark.parametrize("rank", [64, 160, 192])
@pytest.mark.parametrize("which", ["target", "mtp"])
def test_a_query_rank_within_a_block_is_not_fused(loader, odd, rank, which):
    model = odd(q_lora_rank=rank)
    arguments = list(arguments_of(which))
    (line,) = both(loader, str(model), arguments, {}, draft=which == "mtp")
    assert "attn.wq_a and attn.wkv: SGLang keeps both in one parameter" in line
    assert line.endswith(f"found {rank} rows; expected a multiple of 128. Set SGLANG_OPT_FUSE_WQA_WKV=0.")
    job = jobs.Load(str(model), which == "mtp", tuple(arguments), keep=".")
    kept = loader.run(unrefused, job).kept
    assert wrong(kept, model, which, 1, 0) == [f"{HELD[which][0]}.self_attn.wqkv_a"]
    assert both(loader, str(model), arguments, APART, draft=which == "mtp") == []
    loads_right(loader, model, which, flags=APART)


def test_dspark_keeps_the_two_apart_by_itself(loader, odd):
    model = odd("dspark", q_lora_rank=192)
    kept = loader.run(unrefused, jobs.Load(str(model), draft=True, keep=".")).kept
    assert wrong(kept, model, "dspark", 1, 0) == []


@pytest.mark.parametrize(
    ("sizes", "arguments", "line", "raised"),
    [
        ({"o_lora_rank": 192}, TP2, "attn.wo_b: 384 columns over 2 attention ranks", "input_size_per_partition = 192"),
        (
            {"head_dim": 576, "num_attention_heads": 2},
            TP2,
            "attn.wq_b: 1152 rows over 2 attention ranks",
            "output_partition_size = 576",
        ),
        (
            {"moe_intermediate_size": 192, "n_shared_experts": 2},
            (),
            "experts of width 192 would be padded to 256, and several shared experts stand side by side",
            "several shared experts stand side by side",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_before_sglang_raises(loader, odd, sizes, arguments, line, raised):
    model = odd(**sizes)
    (found,) = [said for said in both(loader, str(model), list(arguments), {}) if line in said]
    with pytest.raises(ValueError, match=raised):
        loader.run(unrefused, jobs.Load(str(model), arguments=tuple(arguments)))
    assert found


@pytest.mark.parametrize("which", ["target", "mtp"])
@pytest.mark.parametrize(
    ("sizes", "arguments"),
    [
        ({"o_lora_rank": 192}, ()),
        ({"o_lora_rank": 64, "o_groups": 4}, TP2),
        ({"num_attention_heads": 1, "o_groups": 8}, ()),
    ],
)
def test_a_group_within_a_block_is_not_kept_in_fp8(keeping_loader, loader, odd, sizes, arguments, which):
    model = odd(**sizes)
    arguments = arguments_of(which, arguments)
    (line,) = both(keeping_loader, str(model), list(arguments), {}, draft=which == "mtp")
    assert "attn.wo_a in FP8: SGLang takes it by group" in line
    assert line.endswith("Set SGLANG_OPT_FP8_WO_A_GEMM=0.")
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        keeping_loader.run(unrefused, jobs.Load(str(model), which == "mtp", tuple(arguments)))
    assert both(loader, str(model), list(arguments), {}, draft=which == "mtp") == []  # there, the flag is 0


def test_what_is_in_bf16_has_no_block_to_end_on(loader, odd, tmp_path):
    """Both halves in BF16 in every layer: SGLang fuses them without a scale, and the draft, in FP8, is not loaded."""
    source = odd(q_lora_rank=192)
    files = shards.tensors(source)
    places = [f"layers.{layer}.attn.{name}" for layer in (0, 1) for name in ("wq_a", "wkv")]

    def in_bf16(checkpoint):
        for place in places:
            shard = shards.of(checkpoint, f"{place}.weight")
            weight, bits = shard[f"{place}.weight"], in_file(files, place).astype(np.float32).view(np.uint32) >> 16
            shard[f"{place}.weight"] = replace(weight, dtype="BF16", data=bits.astype(np.uint16).tobytes())
            del shard[f"{place}.scale"]

    model = shards.edited(source, tmp_path / "bf16", in_bf16)
    assert both(loader, str(model), [], {}) == []
    kept = loader.load(model, keep=r"wqkv_a").kept["model.layers.1.self_attn.wqkv_a.weight"]
    assert np.array_equal(kept, np.concatenate([in_file(files, place) for place in places[2:]]))
    assert both(loader, str(model), list(jobs.NEXTN), {}, draft=True)[0].startswith("draft: attn.wq_a and attn.wkv")


# --- a draft by its own sizes -----------------------------------------------------------------------------------------


def refused(loader, model, arguments):
    """What `check` refuses, each up to its remedy, where every rank holds the whole shared expert."""
    said = loader.run(jobs.command, ["check", str(model), "--json", *arguments], WHOLE_SHARED)
    return [refusal["message"].partition(";")[0].partition(". ")[0] for refusal in json.loads(said.out)["refusals"]]


def beside(draft):
    return [*jobs.NEXTN, "--speculative-draft-model-path", str(draft)]


def test_experts_are_split_by_each_models_own_number(loader, odd):
    eight, six, ten = odd(), odd(n_routed_experts=6), odd(n_routed_experts=10)
    split = ["--tp-size", "4", "--ep-size", "4", "--attn-dp-size", "2"]
    cut = "routed experts cannot be split over 4 expert-parallel ranks"
    assert refused(loader, eight, [*split, *beside(six)]) == [f"draft: 6 {cut}"]
    assert refused(loader, six, [*split, *beside(eight)]) == [f"6 {cut}"]
    assert refused(loader, ten, [*split, *beside(six)]) == [f"10 {cut}", f"draft: 6 {cut}"]
    assert both(loader, str(eight), [*TP2, "--ep-size", "2", *beside(six)], {}, draft=True) == []
    assert both(loader, str(eight), [*split, *beside(six)], WHOLE_SHARED, draft=True)


@pytest.mark.parametrize(("target", "draft"), [(128, 192), (192, 128)])
def test_fusing_is_judged_for_each_model(loader, odd, target, draft):
    arguments = beside(odd(q_lora_rank=draft))
    (line,) = both(loader, str(odd(q_lora_rank=target)), arguments, {}, draft=True)
    assert line.startswith("draft: attn.wq_a" if draft == 192 else "attn.wq_a")
    assert both(loader, str(odd(q_lora_rank=target)), arguments, APART, draft=True) == []


def with_four_experts(checkpoint):
    """The draft's first four experts alone, and their rows of its router."""
    for shard in checkpoint.values():
        for name, tensor in list(shard.items()):
            expert = re.match(r"mtp\.\d+\.ffn\.experts\.(\d+)\.", name)
            if expert is not None and int(expert[1]) >= 4:
                del shard[name]
            elif re.match(r"mtp\.\d+\.ffn\.gate\.", name):
                shape, data = (4, *tensor.shape[1:]), tensor.data[: len(tensor.data) // 2]
                shard[name] = replace(tensor, shape=shape, data=data)


def test_a_dspark_draft_has_a_number_of_experts_of_its_own(loader, odd, tmp_path):
    model = shards.edited(odd("dspark"), tmp_path / "four", with_four_experts)
    config = json.loads((model / "config.json").read_text())
    own = {"dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(config | own))
    kept = loader.load(model, draft=True, keep=".").kept
    assert kept["stages.0.mlp.experts.w13_weight"].shape[0] == 4
    assert wrong(kept, model, "dspark", 1, 0) == []
    assert loader.load(model, keep="experts").kept["model.layers.1.mlp.experts.w13_weight"].shape[0] == 8
    assert refused(loader, model, [*EIGHT, *DSPARK]) == [
        "draft: 4 routed experts cannot be split over 8 expert-parallel ranks",
        "draft: --tp-size 8 is more than the 4 routed experts",
    ]
    assert refused(loader, model, EIGHT) == []


def test_a_draft_in_bf16_turns_the_fp8_product_of_wo_a_off_for_both(keeping_loader, odd, tmp_path):
    """One flag rules target and MTP draft: asking for FP8 is refused, and check names the draft's wo_a."""
    source = odd()
    files = shards.tensors(source)

    def in_bf16(checkpoint):
        shard = shards.of(checkpoint, "mtp.0.attn.wo_a.weight")
        bits = in_file(files, "mtp.0.attn.wo_a").astype(np.float32).view(np.uint32) >> 16
        weight = shard["mtp.0.attn.wo_a.weight"]
        shard["mtp.0.attn.wo_a.weight"] = replace(weight, dtype="BF16", data=bits.astype(np.uint16).tobytes())
        del shard["mtp.0.attn.wo_a.scale"]

    draft = str(shards.edited(source, tmp_path / "draft", in_bf16))
    flag = {"SGLANG_OPT_FP8_WO_A_GEMM": "1"}
    (line,) = both(keeping_loader, str(source), beside(draft), flag, draft=True)
    assert line.startswith("SGLANG_OPT_FP8_WO_A_GEMM=1 needs attn.wo_a in FP8; found attn.wo_a in BF16 in some layers")
    assert both(keeping_loader, draft, [], flag) == []  # its target is in FP8, and no draft is loaded

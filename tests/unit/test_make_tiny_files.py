"""What make-tiny writes: files, one model in every layout, `--from`, shards, refusals."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from sglang_dsv4.checkpoint.tiny.config import native_config
from sglang_dsv4.checkpoint.tiny.grammar import Slot
from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny, write_model
from sglang_dsv4.checkpoint.tiny.quantize import Plain, to_bf16
from sglang_dsv4.checkpoint.tiny.sources import Drawn
from sglang_dsv4.cli.main import main
from sglang_dsv4.errors import FlagError, InexactConversionError, LayoutError, RefusedError

TORCH = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I8": torch.uint8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder by the safetensors format alone, E8M0 as bytes; checks layout and index on the way."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            dtype = TORCH[entry["dtype"]]
            assert start == end
            assert start % dtype.itemsize == 0
            assert stop - start == math.prod(entry["shape"]) * dtype.itemsize
            assert index["weight_map"].pop(name) == file.name
            raw = torch.frombuffer(bytearray(data[8 + length + start : 8 + length + stop]), dtype=torch.uint8)
            tensors[name] = raw.view(dtype).reshape(entry["shape"])
            end = stop
        assert 8 + length + end == len(data)
        total += end
    assert index["weight_map"] == {}
    assert index["metadata"]["total_size"] == total
    return tensors


def power(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def fp4_codes(packed: torch.Tensor) -> torch.Tensor:
    return E2M1[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()]


def numbers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FP32 values by the name without suffix, whatever the layout: each from its siblings, by the formats' rules."""
    values = {}
    for name, weight in tensors.items():
        stem, _, suffix = name.rpartition(".")
        own = {part: tensors.get(f"{stem}.{part}") for part in SCALES}
        blocks = next(
            (own[part] for part in ("scale", "weight_scale", "weight_scale_inv") if own[part] is not None), None
        )
        if suffix == "weight_packed":
            group = own["weight_scale"].float().repeat_interleave(16, 1)
            values[stem] = fp4_codes(weight) * group / own["weight_global_scale"]
        elif suffix == "weight" and own["weight_scale_2"] is not None:
            group = own["weight_scale"].float().repeat_interleave(16, 1)
            values[stem] = fp4_codes(weight) * group * own["weight_scale_2"]
        elif suffix == "weight" and weight.dtype == torch.uint8:
            values[stem] = fp4_codes(weight) * power(blocks).repeat_interleave(32, 1)
        elif suffix == "weight" and weight.dtype == torch.float8_e4m3fn:
            spread = power(blocks).repeat_interleave(128, 0).repeat_interleave(128, 1)
            values[stem] = weight.float() * spread[: weight.shape[0], : weight.shape[1]]
        elif suffix == "weight":
            values[stem] = weight.float()
        elif "." not in name or suffix not in SCALES or stem.endswith("_hc"):
            values[name] = weight.float()
    return values


SCALES = ("scale", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale")
SCALES += ("input_global_scale",)

LAYOUTS = {
    "fp8": Options(draft="mtp", expert_format="fp8"),
    "wo_a": Options(draft="mtp", wo_a="bf16"),
    "base": Options(draft="mtp", expert_format="fp8", scales="float32"),
    "modelopt": Options(draft="mtp", expert_format="nvfp4"),
    "dump": Options(draft="mtp", expert_format="bf16"),
    "redhat": Options(draft="none", names="compressed-tensors"),
    "canada": Options(draft="mtp", names="compressed-tensors"),
    "quark": Options(draft="mtp", names="quark"),
    "hf-fp4": Options(draft="none", names="hf"),
    "hf-fp8": Options(draft="none", names="hf", expert_format="fp8"),
    "hf-float": Options(draft="none", names="hf", expert_format="fp8", scales="float32"),
    "hybrid": Options(draft="none", names="hf", expert_format="bf16"),
}


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    assert make_tiny(folder, Options(draft="mtp")).rounded == []
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_numbers(layout, native, tmp_path):
    options = LAYOUTS[layout]
    made = make_tiny(tmp_path / "out", options)
    assert made.rounded == []
    tensors = read(tmp_path / "out")
    assert len(tensors) == made.tensors
    values, wanted = numbers(tensors), numbers(read(native))
    if options.names == "hf":
        values = {to_native(name): value for name, value in values.items()}
    copies = {"mtp.0.emb.tok_emb": "embed", "mtp.0.head": "head"}
    for name, value in values.items():
        assert torch.equal(value, wanted[copies.get(name, name)]), name
    missing = wanted.keys() - values.keys()
    assert missing == {name for name in wanted if name.startswith("mtp.") and options.draft == "none"}


def to_native(name: str) -> str:
    """Native spelling of a transformers name, by plain replacements from the description of the format."""
    name = name.removeprefix("model.")
    for theirs, ours in (
        ("embed_tokens", "embed"),
        ("lm_head", "head"),
        ("hc_head.hc_", "hc_head_"),
        ("attn.norm", "attn.kv_norm"),
        ("self_attn", "attn"),
        ("compressor.indexer.q_b_proj", "indexer.wq_b"),
        ("compressor.indexer.scorer", "indexer"),
        ("compressor.indexer", "indexer.compressor"),
        ("compressor.kv_norm", "compressor.norm"),
        ("position_bias", "ape"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("attn_hc.", "hc_attn_"),
        ("ffn_hc.", "hc_ffn_"),
        ("q_a_proj", "wq_a"),
        ("q_b_proj", "wq_b"),
        ("q_a_norm", "q_norm"),
        ("kv_proj", "wkv"),
        ("o_a_proj", "wo_a"),
        ("o_b_proj", "wo_b"),
        ("sinks", "attn_sink"),
        ("mlp", "ffn"),
        ("e_score_correction_bias", "bias"),
        ("compressor.gate_proj", "compressor.wgate"),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
    ):
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_a_native_checkpoint_is_as_from_the_seed(layout, native, tmp_path):
    """The numbers are the same, so the files are, byte for byte."""
    options = LAYOUTS[layout]
    make_tiny(tmp_path / "seed", options)
    make_tiny(tmp_path / "from", replace(options, source=native))
    seeded = sorted(path.name for path in (tmp_path / "seed").iterdir())
    assert seeded == sorted(path.name for path in (tmp_path / "from").iterdir())
    for name in seeded:
        assert (tmp_path / "seed" / name).read_bytes() == (tmp_path / "from" / name).read_bytes(), name


def test_a_source_without_a_draft_is_given_one(tmp_path):
    make_tiny(tmp_path / "plain", Options(seed=5))
    make_tiny(tmp_path / "drafted", Options(seed=7, source=tmp_path / "plain", draft="dspark"))
    plain, drafted = read(tmp_path / "plain"), read(tmp_path / "drafted")
    assert all(torch.equal(drafted[name], tensor) for name, tensor in plain.items())
    assert {name.split(".")[1] for name in drafted if name not in plain} == {"0", "1", "2"}
    config = json.loads((tmp_path / "drafted" / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4, 128, 4, 0, 0, 0]
    assert config["dspark_target_layer_ids"] == [1, 2, 3]


def test_the_draft_of_a_source_can_be_dropped(native, tmp_path):
    make_tiny(tmp_path / "out", Options(source=native, draft="none"))
    assert not any(name.startswith("mtp.") for name in read(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4, 128, 4]
    assert config["num_nextn_predict_layers"] == 0


def test_companions_of_a_source_come_along(native, tmp_path):
    make_tiny(tmp_path / "source", Options(source=native))
    (tmp_path / "source" / "verse.txt").write_text("a line")
    make_tiny(tmp_path / "out", Options(names="hf", draft="none", source=tmp_path / "source"))
    assert (tmp_path / "out" / "verse.txt").read_text() == "a line"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["layer_types"][0] == "sliding_attention"


def test_the_seed_decides_the_numbers(native, tmp_path):
    make_tiny(tmp_path / "other", Options(seed=1, draft="mtp"))
    other, first = read(tmp_path / "other"), read(native)
    same = [name for name in first if torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8))]
    assert all(first[name].numel() <= 4 for name in same)  # a handful of block scales may agree by chance


def test_the_blocks_of_a_tensor_differ_in_scale(tmp_path):
    """A scale that is right for one block only must show."""
    make_tiny(tmp_path / "out", Options(expert_format="fp8"))
    tensors = read(tmp_path / "out")
    scales = [tensor for name, tensor in tensors.items() if name.endswith(".scale") and tensor.numel() >= 8]
    assert len(scales) > 10
    assert all(len(scale.unique()) > 1 for scale in scales)
    shared = [tensor for name, tensor in tensors.items() if ".experts." in name and name.endswith(".scale")]
    assert len(torch.cat([scale.flatten() for scale in shared]).unique()) >= 3


@pytest.mark.parametrize("fails_at", ["embed.weight", "layers.2.ffn.experts.3.w1.weight"])
@pytest.mark.parametrize("out", ["out", "a/b/out", "there"])
def test_what_fails_leaves_nothing_behind(out, fails_at, tmp_path):
    """Whatever stops it, in the first shard or later: a shard that was begun would count as weights."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    config = native_config("tiny", "none")
    drawn = Drawn(0, 8)

    def numbers(slot: Slot):
        if slot.name == fails_at:
            raise KeyboardInterrupt
        return drawn(slot)

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / out, Options(), config, numbers)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "there",
        "there/notes.txt",
    ]
    write_model(tmp_path / out, Options(), config, drawn)
    assert len(read(tmp_path / out)) == 340


def test_a_refused_source_can_be_corrected(native, tmp_path, capsys):
    make_tiny(tmp_path / "hf", Options(names="hf"))
    assert main(["make-tiny", str(tmp_path / "out"), "--from", str(tmp_path / "hf")]) == 1
    assert not (tmp_path / "out").exists()
    assert main(["make-tiny", str(tmp_path / "out"), "--from", str(native)]) == 0


@pytest.mark.parametrize("shards", [1, 3, 40, None])
def test_shards_are_filled_in_order(shards, tmp_path):
    made = make_tiny(tmp_path / "out", Options(shards=shards))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = shards or 6
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert len(read(tmp_path / "out")) == made.tensors == 340


def test_scales_of_numbers_that_lie_on_no_common_grid_are_rounded_and_named(tmp_path):
    config = native_config("tiny", "none")
    drawn = Drawn(0, 8)

    def numbers(slot: Slot):
        if slot.name != "layers.2.attn.compressor.wkv.weight":
            return drawn(slot)
        return Plain(to_bf16(np.random.default_rng(0).normal(0, 1, slot.shape).astype(np.float32)))

    made = write_model(tmp_path / "base", Options(expert_format="fp8", scales="float32"), config, numbers)
    (line,) = made.rounded
    assert line.startswith("layers.2.attn.compressor.wkv.weight: off by 0.0")
    assert write_model(tmp_path / "native", Options(), config, numbers).rounded == []


def test_fp4_numbers_beyond_fp8_are_refused_by_name(tmp_path):
    config = native_config("tiny", "none")
    drawn = Drawn(0, 8)

    def numbers(slot: Slot):
        form = drawn(slot)
        if slot.name == "layers.1.ffn.experts.6.w2.weight":
            form.scale[3, 0] = 90
        return form

    with pytest.raises(InexactConversionError, match=r"layers\.1\.ffn\.experts\.6\.w2"):
        write_model(tmp_path / "out", Options(expert_format="fp8"), config, numbers)


def test_a_source_that_is_not_native_is_refused_by_name(tmp_path):
    make_tiny(tmp_path / "fp8", Options(expert_format="fp8"))
    with pytest.raises(LayoutError, match=r"layers\.0\.ffn\.experts\.0\.w1\.weight"):
        make_tiny(tmp_path / "out", Options(source=tmp_path / "fp8"))


def test_a_source_that_lacks_a_tensor_of_its_draft_is_refused(native, tmp_path):
    """Never filled up from the seed: the draft would be half the source's."""
    make_tiny(tmp_path / "source", Options(source=native, draft="none"))
    config = tmp_path / "source" / "config.json"
    config.write_text((native / "config.json").read_text())
    with pytest.raises(LayoutError, match=r"mtp\.0\.attn\.wq_a\.weight"):
        make_tiny(tmp_path / "out", Options(source=tmp_path / "source"))


def test_a_folder_with_weights_is_left_alone(native):
    before = {path: path.stat().st_mtime_ns for path in native.iterdir()}
    with pytest.raises(RefusedError, match="holds weights already"):
        make_tiny(native, Options())
    assert before == {path: path.stat().st_mtime_ns for path in native.iterdir()}


@pytest.mark.parametrize(
    "options",
    [
        Options(shards=0),
        Options(shards=1000),
        Options(layers=0),
        Options(layers=5),
        Options(experts=0),
        Options(source=Path("x"), shape="flash"),
        Options(source=Path("x"), layers=2),
    ],
)
def test_options_that_cannot_be_are_refused(options, tmp_path):
    with pytest.raises(FlagError):
        make_tiny(tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_the_command_line_names_the_legal_layouts_and_exits_2(tmp_path, capsys):
    assert main(["make-tiny", str(tmp_path / "out"), "--names", "quark", "--draft", "dspark"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "sglang_dsv4: no DeepSeek-V4 checkpoint has this layout; found --names quark --draft dspark"
    )
    assert "--names quark --experts fp4 --scales e8m0 --draft none|mtp" in error
    assert not (tmp_path / "out").exists()


def test_the_command_line_writes_a_checkpoint(tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--experts", "nvfp4", "--draft", "mtp", "--shards", "2", "--seed", "3", "--layers", "2"]
    assert main(["make-tiny", str(out), *options, "--num-experts", "3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: nvfp4 experts, e8m0 scales, mtp draft; ")
    assert said.endswith(" in 2 shards (--names native --experts nvfp4 --scales e8m0 --draft mtp)\n")
    tensors = read(out)
    assert tensors["layers.1.ffn.experts.2.w1.weight_scale_2"].shape == ()
    assert tensors["mtp.0.ffn.experts.2.w1.scale"].shape == (256, 8)
    assert tensors["layers.0.ffn.gate.tid2eid"].max() == 2


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("", "fp4 experts, e8m0 scales, no draft; --names native --experts fp4 --scales e8m0 --draft none"),
        ("--scales float32", "fp8 experts, float32 scales, no draft; --names native --experts fp8 --scales float32"),
        ("--experts bf16 --draft dspark", "bf16 experts, dspark draft; --names native --experts bf16 --draft dspark"),
        ("--wo-a bf16", "fp4 experts, e8m0 scales, no draft; --scales e8m0 --draft none --wo-a bf16)"),
    ],
)
def test_the_command_line_says_what_was_made(tmp_path, capsys, given, made):
    out = tmp_path / "out"
    assert main(["make-tiny", str(out), *given.split(), "--layers", "1", "--shards", "1"]) == 0
    said = capsys.readouterr().out
    words, options = made.split("; ")
    assert said.startswith(f"{out}: {words}; ")
    assert " bytes in 1 shard (" in said
    assert options in said


def test_a_refusal_of_the_source_exits_1(tmp_path, capsys):
    assert main(["make-tiny", str(tmp_path / "out"), "--from", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_the_tokenizer_takes_one_token_a_byte(native):
    tokenizer = Tokenizer.from_file(str(native / "tokenizer.json"))
    text = "wörld\n\x00 <think>"
    ids = tokenizer.encode(text).ids
    assert ids[:-1] == [0, *(3 + byte for byte in "wörld\n\x00 ".encode())]
    assert tokenizer.id_to_token(ids[-1]) == "<think>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    special = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "</think>")
    assert [tokenizer.encode(token, add_special_tokens=False).ids for token in special] == [
        [0],
        [1],
        [259],
        [260],
        [262],
    ]
    config = json.loads((native / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    assert tokenizer.get_vocab_size() <= config["vocab_size"]


def test_hash_layers_send_every_token_to_distinct_experts(native):
    table = read(native)["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (512, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert sorted(table.unique().tolist()) == list(range(8))

"""`sglang-dsv4 check` on what cannot work: every fault is named, together with all others, with a way out."""

import json
import os
import shutil

import grammar
import pytest
from check_runs import Run, header_end, reads, write

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny
from sglang_dsv4.cli.check.arguments import as_server_arguments
from sglang_dsv4.cli.main import build_parser, main
from sglang_dsv4.decisions import resolution
from sglang_dsv4.decisions.launch import survey_launch
from sglang_dsv4.errors import RefusedError, together

INDEX = "model.safetensors.index.json"


@pytest.fixture
def run(capsys, monkeypatch):
    return Run(capsys, monkeypatch)


def shard(number: int, total: int = 10) -> str:
    return f"model-{number:05d}-of-{total:05d}.safetensors"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def rename(spec: grammar.Spec, old: str, new: str) -> None:
    spec[new] = spec.pop(old)


# --- faults of the files, one at a time -------------------------------------------------------------------------------


def cut_short(folder):
    os.truncate(folder / shard(4), (folder / shard(4)).stat().st_size - 100)


def make_a_hole(folder):
    path = folder / shard(3)
    end = header_end(path)
    header = json.loads(path.read_bytes()[8:end])
    first = min(header.values(), key=lambda entry: entry["data_offsets"])
    first["data_offsets"] = [offset + 2 for offset in first["data_offsets"]]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 10**6)


def unknown_dtype(folder):
    path = folder / shard(1)
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"BF17"', 1))


def forget_a_shard(folder):
    (folder / shard(9)).unlink()


def another_model(folder):
    edit_config(folder, architectures=["Qwen3ForCausalLM"])


def index_of_another_revision(folder):
    table = json.loads((folder / INDEX).read_text())
    table["weight_map"]["norm.weight"] = shard(1)
    (folder / INDEX).write_text(json.dumps(table))


def two_copies(folder):
    (folder / INDEX).unlink()
    shutil.copy(folder / shard(1), folder / "model.safetensors")


def gguf(folder):
    for path in folder.iterdir():
        path.unlink()
    (folder / "v4-q4.gguf").write_bytes(b"GGUF")


def expert_pack(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "v4.expertpack").write_bytes(b"SGLANG-EXPERTPACK-v1")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (cut_short, "TruncatedShardError", [shard(4), "the shard is cut short", "Download the shard again."]),
        (make_a_hole, "HeaderError", [shard(3), "a hole in the data"]),
        (unknown_dtype, "HeaderError", ["embed.weight: unknown dtype; found BF17"]),
        (forget_a_shard, "IndexMismatchError", [f"no file for 1 of 10 shards; found no {shard(9)}"]),
        (another_model, "UnknownArchitectureError", ["Qwen3ForCausalLM", "Leave out --model-impl sglang_dsv4"]),
        (index_of_another_revision, "IndexMismatchError", ["1 misplaced", "norm.weight"]),
        (two_copies, "IndexMismatchError", ["1 tensor name in two shards; found embed.weight"]),
        (gguf, "CheckpointNotFoundError", ["found v4-q4.gguf", "leave out --model-impl sglang_dsv4"]),
        (expert_pack, "CheckpointNotFoundError", ["found v4.expertpack", "leave out --model-impl"]),
    ],
)
def test_a_broken_file(run, tmp_path, damage, code, words):
    folder = write(tmp_path / "v4")
    damage(folder)
    [(found, message)] = run.refusals(folder)
    assert found == code
    assert [word for word in words if word not in message] == []


def test_a_path_that_is_not_there(run, tmp_path):
    assert run.refusals(tmp_path / "nowhere")[0][0] == "CheckpointNotFoundError"
    status, lines = run.text(tmp_path / "nowhere")
    assert status == 1
    assert lines[-1] == "1 refusal"


# --- names and shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda spec: spec.update({"layers.1.attn.extra.weight": ("BF16", (2,))}), "unexpected: layers.1.attn.extra"),
        (lambda spec: spec.pop("layers.3.attn.compressor.ape"), "missing: layers.3.attn.compressor.ape"),
        (lambda spec: spec.pop("layers.0.ffn.gate.tid2eid"), "missing: layers.0.ffn.gate.tid2eid"),
        (
            lambda spec: [
                spec.pop(f"layers.{n}.attn.indexer.wq_b.{leaf}") for n in (2, 4) for leaf in ("weight", "scale")
            ],
            "missing: layers.{2,4}.attn.indexer.wq_b.weight",
        ),
        (
            lambda spec: spec.update({"layers.2.ffn.gate.weight": ("BF16", (4, 256))}),
            "wrong: layers.2.ffn.gate.weight: found shape [4, 256], expected [8, 256]",
        ),
        (
            lambda spec: spec.update({"layers.2.attn_norm.weight": ("I32", (256,))}),
            "wrong: layers.2.attn_norm.weight: found dtype I32",
        ),
    ],
)
def test_a_tensor_that_does_not_belong(run, tmp_path, change, line):
    folder = write(tmp_path / "v4", "none", change=change)
    [(code, message)] = run.refusals(folder)
    assert code == "IncompleteLoadError"
    assert line in message


def test_a_draft_alone_is_no_model(run, tmp_path):
    folder = write(tmp_path / "v4", change=lambda spec: [spec.pop(n) for n in list(spec) if not n.startswith("mtp.")])
    [(code, message)] = run.refusals(folder)
    assert code == "IncompleteLoadError"
    assert "\n  missing: layers.{0..4}.attn.wq_a.weight\n" in message


def test_the_first_shard_alone(run, tmp_path):
    folder = write(tmp_path / "v4", "none")
    (folder / shard(1, 7)).rename(folder / "model.safetensors")
    for path in (folder / INDEX, *folder.glob("model-*")):
        path.unlink()
    [(code, message)] = run.refusals(folder)
    assert code == "IncompleteLoadError"
    for line in ("head.weight (nor as", "norm.weight (nor as", "layers.{0..4}.ffn.experts.{0..7}.w1.weight"):
        assert f"\n  missing: {line}" in message
    assert "unexpected" not in message


@pytest.mark.parametrize("stem", ["layers.3.ffn.experts.5.w2", "layers.2.attn.wq_a"])
@pytest.mark.parametrize(("lost", "kept"), [("weight", "scale"), ("scale", "weight")])
def test_half_a_pair_is_told_once_and_as_what_is_missing(run, tmp_path, stem, lost, kept):
    folder = write(tmp_path / "v4", "none", change=lambda spec: spec.pop(f"{stem}.{lost}"))
    [(code, message)] = run.refusals(folder)
    assert code == "IncompleteLoadError"
    assert message.endswith(f"\n  missing: {stem}.{lost} ({stem}.{kept} is without its {lost})")


def test_everything_in_one_report(run, tmp_path, monkeypatch):
    def change(spec):
        spec["layers.1.attn.extra.weight"] = ("BF16", (2,))
        rename(spec, "layers.2.attn.q_norm.weight", "layers.2.attn.query_norm.weight")
        for leaf in ("weight", "scale"):
            del spec[f"layers.3.ffn.experts.5.w2.{leaf}"]
        spec["layers.4.attn.wkv.scale"] = ("F8_E8M0", (3, 3))
        for name in [name for name in spec if name.startswith("mtp.1.")]:
            del spec[name]

    folder = write(tmp_path / "v4", change=change, index=False)
    grammar.write_shard(folder / "copy.safetensors", {"norm.weight": ("BF16", (256,))})
    monkeypatch.setenv("SGLANG_DSV4_FP4_EXPERTS", "0")
    found = run.refusals(folder, "--tp-size", 3)
    said = {code: message for code, message in found}
    assert [code for code, _ in found][:3] == ["IndexMismatchError", "IncompleteLoadError", "LayoutError"]
    assert "norm.weight in copy.safetensors" in said["IndexMismatchError"]
    layout = "\n".join(message for code, message in found if code == "LayoutError")
    assert "the draft has a gap in its stages; found mtp.{0,2}" in layout
    assert "layers.4.attn.wkv.scale: the scale fits no square block" in layout
    for line in (
        "unexpected: layers.1.attn.extra.weight",
        "unexpected: layers.2.attn.query_norm.weight",
        "missing: layers.2.attn.q_norm.weight",
        "missing: layers.3.ffn.experts.5.w2.weight",
        "wrong: layers.4.attn.wkv.scale: found shape [3, 3], expected [1, 2]",
    ):
        assert line in said["IncompleteLoadError"]
    assert "SGLANG_DSV4_FP4_EXPERTS=0" in said["experts-flag-contradicts-header"]


def test_a_partial_download_with_a_bad_config(run, tmp_path):
    folder = write(tmp_path / "v4")
    forget_a_shard(folder)
    (folder / f"{shard(9)}.incomplete").write_bytes(b"")
    cut_short(folder)
    edit_config(folder, hidden_size=None)
    found = run.refusals(folder)
    assert [code for code, _ in found] == ["ConfigError", "IndexMismatchError", "TruncatedShardError"]
    assert "hidden_size" in found[0][1]
    assert f"unfinished download: {folder / shard(9)}.incomplete" in found[1][1]
    assert shard(4) in found[2][1]


def test_a_draft_that_nobody_asked_for_may_be_broken(run, tmp_path):
    folder = write(tmp_path / "v4", change=lambda spec: spec.pop("mtp.0.main_norm.weight"))
    report = run.json(folder)
    assert report["ok"]
    assert "the bundled draft, not asked for, could not be loaded: missing: mtp.0.main_norm.weight" in report["notes"]
    [(code, message)] = run.refusals(folder, "--speculative-algorithm", "DSPARK")
    assert code == "IncompleteLoadError"
    assert "missing: mtp.0.main_norm.weight" in message


def test_strictness_can_be_switched_off(run, tmp_path, monkeypatch):
    folder = write(tmp_path / "v4", "none", change=lambda spec: spec.pop("layers.0.attn.q_norm.weight"))
    monkeypatch.setenv("SGLANG_DSV4_PLUGIN_STRICT", "0")
    report = run.json(folder)
    assert report["ok"]
    assert "SGLANG_DSV4_PLUGIN_STRICT=0 lets this pass: missing: layers.0.attn.q_norm.weight" in report["notes"]


# --- what is worth a note ---------------------------------------------------------------------------------------------


def test_other_spellings_and_files(run, tmp_path):
    def change(spec):
        rename(spec, "norm.weight", "final_norm.weight")
        del spec["layers.0.attn.attn_sink"]

    folder = write(tmp_path / "v4", "none", change=change)
    grammar.write_shard(folder / "consolidated.safetensors", {"a": ("BF16", (1,))})
    notes = run.json(folder)["notes"]
    assert "final_norm.weight is read as norm.weight" in notes
    assert "absent, which is allowed: layers.0.attn.attn_sink" in notes
    assert "consolidated.safetensors is not read: the index does not name it" in notes


def test_config_and_tensors_disagree(run, tmp_path):
    folder = write(tmp_path / "v4", "none")
    edit_config(folder, expert_dtype="fp8")
    report = run.json(folder)
    assert report["ok"]
    assert [note for note in report["notes"] if "config.json says fp8" in note and "the tensors say fp4" in note]


def test_config_of_newer_transformers(run, tmp_path):
    folder = write(tmp_path / "v4", "none")
    config = json.loads((folder / "config.json").read_text())
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config["layer_types"] = [kinds[ratio] for ratio in config.pop("compress_ratios")]
    config["mlp_layer_types"] = ["hash_moe"] * config.pop("num_hash_layers") + ["moe"] * 2
    (folder / "config.json").write_text(json.dumps(config))
    assert [note for note in run.json(folder)["notes"] if "spelling of newer transformers" in note]


# --- layouts and launches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    ["ct_w4a16_fp8", "autoround_w4a16_native", "gptq_w4a16_transformers", "w4afp8_sglang"],
)
@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx950"])
def test_layouts_that_do_not_run(run, tmp_path, layout, arch):
    draft = grammar.groups(layout)[-1]
    spec = grammar.expand(layout, "tiny_flash", draft)
    folder = grammar.write(tmp_path / "v4", spec, grammar.config(layout, "tiny_flash", draft))
    message = dict(run.refusals(folder, arch=arch))["experts-format"]
    assert ".experts." in message
    assert "Use a checkpoint with FP4 (MXFP4), FP8, NVFP4 or BF16 experts." in message


@pytest.mark.parametrize(
    ("draft", "asked", "fitting"),
    [("dspark", "EAGLE", "DSPARK"), ("mtp", "DSPARK", "EAGLE"), ("dspark", "NEXTN", "DSPARK")],
)
def test_a_draft_of_the_wrong_kind(run, tmp_path, draft, asked, fitting):
    folder = write(tmp_path / "v4", draft)
    report = run.json(folder, "--speculative-algorithm", asked)
    [refusal] = report["refusals"]
    assert (refusal["code"], refusal["found"]) == ("draft-kind", f"a draft of kind {draft}")
    assert f"--speculative-algorithm {fitting}" in report["launch"]


def test_a_draft_in_a_checkpoint_of_its_own(run, tmp_path):
    target, draft = write(tmp_path / "target", "none"), tmp_path / "draft"
    assert run.refusals(target, "--speculative-algorithm", "DSPARK")[0][0] == "draft-missing"
    spec = grammar.expand("native_fp4_fp8", "tiny_flash", "dspark")
    own = {name: value for name, value in spec.items() if name.startswith("mtp.")}
    grammar.write(draft, own, grammar.config("native_fp4_fp8", "tiny_flash", "dspark"))
    options = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", draft)
    report = run.json(target, *options)
    assert report["refusals"] == []
    assert report["layout"]["draft"]["from"] == str(draft)
    assert report["weights"]["draft"]["nbytes"] == grammar.nbytes(own)
    assert f"--speculative-draft-model-path {draft}" in report["launch"]
    grammar.write(
        draft,
        {name: value for name, value in own.items() if "markov" not in name},
        grammar.config("native_fp4_fp8", "tiny_flash", "dspark"),
    )
    [(code, message)] = run.refusals(target, *options)
    assert code == "IncompleteLoadError"
    assert "missing: mtp.2.markov_head.markov_w1.weight" in message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"SGLANG_DSV4_FP4_DEQUANT": "on"}, ["SGLANG_DSV4_FP4_DEQUANT", "found 'on'"]),
        (
            {"SGLANG_DSV4_FP4_DEQAUNT": "1"},
            ["SGLANG_DSV4_FP4_DEQAUNT", "Did you mean SGLANG_DSV4_FP4_DEQUANT?"],
        ),
    ],
)
def test_flags_that_cannot_be_read(run, tmp_path, monkeypatch, flags, words):
    folder = write(tmp_path / "v4", "none")
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    report = run.json(folder)
    [refusal] = report["refusals"]
    assert refusal["code"] == "FlagError"
    assert [word for word in words if word not in refusal["message"]] == []
    assert report["launch"] is None
    assert report["files"]["tensors"]  # the files are looked at all the same


IMPOSSIBLE = [
    ("sm90", {}, ["--moe-runner-backend", "triton"]),
    ("sm90", {"SGLANG_DSV4_FP4_DEQUANT": "1"}, ["--moe-runner-backend", "marlin"]),
    ("sm90", {}, ["--tp-size", "3"]),
    ("sm90", {"SGLANG_DSV4_FP4_EXPERTS": "0"}, ["--speculative-algorithm", "DSPARK"]),
    ("sm80", {}, []),
    ("gfx942", {}, []),
    ("sm100", {}, ["--tp-size", "2", "--ep-size", "2", "--enforce-shared-experts-fusion"]),
    ("sm90", {}, ["--moe-a2a-backend", "megamoe", "--tp-size", "2"]),
]


@pytest.mark.parametrize(("arch", "flags", "options"), IMPOSSIBLE)
def test_the_suggested_launch_is_not_refused(run, tmp_path, monkeypatch, arch, flags, options):
    folder = write(tmp_path / "v4", "mtp")
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    report = run.json(folder, *options, arch=arch)
    assert report["refusals"]
    if report["launch"] is None:
        assert arch == "sm80"  # no kernel for four- or eight-bit experts at all
        return
    given = run.pasted(report["launch"])
    again = run.json(*given, arch=arch)
    assert again["refusals"] == []
    assert run.pasted(again["launch"]) == given


@pytest.mark.parametrize(("arch", "flags", "options"), [case for case in IMPOSSIBLE if case[0] != "sm80"])
def test_the_server_refuses_with_the_same_words(run, tmp_path, monkeypatch, arch, flags, options):
    folder = write(tmp_path / "v4", "mtp")
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    messages = [message for _, message in run.refusals(folder, *options, arch=arch)]
    monkeypatch.setattr(resolution, "detect_arch", lambda: arch)
    arguments = as_server_arguments(build_parser().parse_args(["check", str(folder), *options]))
    decision = resolution.decide_launch(arguments)
    with pytest.raises(RefusedError) as caught:
        decision.raise_if_refused()
    assert [message for message in messages if message not in str(caught.value)] == []


def test_files_are_refused_with_the_same_words(run, tmp_path):
    folder = write(tmp_path / "v4", change=lambda spec: spec.pop("layers.0.attn.q_norm.weight"))
    edit_config(folder, num_hash_layers=2)
    messages = [message for _, message in run.refusals(folder)]
    _, faults = survey_launch(as_server_arguments(build_parser().parse_args(["check", str(folder)])))
    assert str(together(faults)).splitlines() == [line for message in messages for line in message.splitlines()]


@pytest.mark.parametrize("options", [["--tp-size", "3"], ["--moe-runner-backend", "triton"]])
@pytest.mark.parametrize("damage", [None, make_a_hole, cut_short])
def test_no_refusal_costs_a_byte_of_data(run, tmp_path, monkeypatch, damage, options):
    folder = write(tmp_path / "v4")
    if damage is not None:
        damage(folder)
    with reads(monkeypatch) as found:
        assert run.refusals(folder, *options)
    ends = {path.name: header_end(path) for path in folder.glob("*.safetensors")}
    assert all(end <= ends.get(name, end) for name, _, end in found)
    assert {name for name, _, _ in found if name in ends} == set(ends)


def test_the_table_shows_each_refusal_and_its_details(run, tmp_path):
    folder = write(tmp_path / "v4", "none", change=lambda spec: spec.pop("layers.0.attn.q_norm.weight"))
    status, lines = run.text(folder, "--moe-runner-backend", "triton")
    assert status == 1
    assert lines[-1] == "2 refusals"
    assert sum(line.startswith("refused ") for line in lines) == 2
    assert any(line.strip() == "missing: layers.0.attn.q_norm.weight" for line in lines)


# --- values that nobody means -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["tp", "ep", "pp", "attn-dp", "attn-cp", "moe-dp"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_are_not_positive(run, tmp_path, size, value):
    report = run.json(write(tmp_path / "v4", "none"), f"--{size}-size={value}")
    assert ("parallel-size", str(value)) in [(refusal["code"], refusal["found"]) for refusal in report["refusals"]]


@pytest.mark.parametrize("count", [0, 2**31 - 1, 2**70, "8"])
def test_a_number_of_experts_that_cannot_be(run, tmp_path, count):
    folder = write(tmp_path / "v4", "none")
    edit_config(folder, n_routed_experts=count)
    [(code, message)] = run.refusals(folder)
    assert code == "ConfigError"
    assert "n_routed_experts" in message


@pytest.mark.parametrize("key", ["kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"])
def test_v41_lists_that_are_none(run, tmp_path, key):
    config = grammar.config("v41_flash", "tiny_v41", "dspark")
    config["text_config"][key] = 3
    folder = grammar.write(tmp_path / "v4", grammar.expand("v41_flash", "tiny_v41", "dspark"), config)
    [(code, message)] = run.refusals(folder)
    assert code == "ConfigError"
    assert f"config.json: {key}; found 3; expected a list of layer numbers. Use the config.json that was" in message


@pytest.mark.parametrize("shape", [(), (32768,), (0, 0), (1, 256, 128)])
@pytest.mark.parametrize("flag", ["0", "1"])
def test_an_expert_of_another_rank(run, tmp_path, monkeypatch, shape, flag):
    """Whatever conversion the launch asks for, the shape is refused, not multiplied."""
    name = "layers.2.ffn.experts.0.w1.weight"
    folder = write(tmp_path / "v4", "none", change=lambda spec: spec.update({name: ("I8", shape)}))
    monkeypatch.setenv("SGLANG_DSV4_FP4_DEQUANT", flag)
    [(code, message)] = run.refusals(folder)
    assert code == "IncompleteLoadError"
    assert f"wrong: {name}: found shape {list(shape)}" in message


def test_a_tensor_without_extent(run, tmp_path):
    folder = write(tmp_path / "v4", "none", change=lambda spec: spec.update({"embed.weight": ("BF16", (0, 256))}))
    assert "wrong: embed.weight: found shape [0, 256]" in run.refusals(folder)[0][1]


def test_a_block_that_the_scales_do_not_have_is_refused_before_the_load(tmp_path, capsys):
    """SGLang allocates the scales by the config; without this, the load ends in mid-stream."""
    make_tiny(tmp_path / "v4", Options())
    config = json.loads((tmp_path / "v4" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    (tmp_path / "v4" / "config.json").write_text(json.dumps(config))
    assert main(["check", str(tmp_path / "v4")]) == 1
    said = capsys.readouterr().out
    assert "weight_block_size is not the block of the scales; found [64, 64]; expected [128, 128]" in said


def test_a_draft_s_class_is_no_model(run, tmp_path):
    folder = write(tmp_path / "v4", "mtp")
    edit_config(folder, architectures=["DeepseekV4ForCausalLMNextN"])
    [(code, message)] = run.refusals(folder)
    assert code == "ConfigError"
    assert "architectures: a draft's class, for the model itself; found DeepseekV4ForCausalLMNextN" in message


def test_an_embedding_is_not_served_for_a_head_that_is_there(run, tmp_path):
    folder = write(tmp_path / "v4", "none")
    edit_config(folder, tie_word_embeddings=True)
    [(code, message)] = run.refusals(folder)
    assert code == "ConfigError"
    assert "tie_word_embeddings: the embedding would be served as the head; found true, and a head.weight" in message


EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", 1, "--speculative-eagle-topk", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DeepseekV4ForCausalLMDSpark"]}, "architectures: not the class of this draft"),
        ({"hidden_size": 512}, "hidden_size: the draft is of another size than its target; found 512; expected 256"),
        ({"vocab_size": 1024}, "vocab_size: the draft is of another size than its target; found 1024; expected 512"),
        ({"hc_mult": 2}, "hc_mult: the draft is of another size than its target; found 2; expected 4"),
        ({"num_hidden_layers": 1, "num_hash_layers": 1}, "cannot name an MTP draft's tensors beside one layer"),
    ],
)
def test_a_draft_that_does_not_fit_its_target(run, tmp_path, changes, message):
    target, draft = write(tmp_path / "target", "none"), write(tmp_path / "draft", "mtp")
    assert run.refusals(target, *EAGLE, "--speculative-draft-model-path", draft) == []
    edit_config(draft, **changes)
    found = [text for _, text in run.refusals(target, *EAGLE, "--speculative-draft-model-path", draft)]
    assert any(message in text for text in found)

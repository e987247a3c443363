"""`sglang-dsv4 check` on sound checkpoints: what it tells, where it finds them, and what it reads of them."""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys

import boto3
import grammar
import pytest
import sglang_source
from check_runs import Run, header_end, reads, write
from moto.server import ThreadedMotoServer

from sglang_dsv4.cli.check import device
from sglang_dsv4.cli.check.arguments import add_arguments
from sglang_dsv4.cli.main import main

LABELS = ("scale", "weight_scale", "weight_scale_2", "input_scale")


@pytest.fixture
def run(capsys, monkeypatch):
    return Run(capsys, monkeypatch)


@pytest.fixture(scope="module")
def dspark(tmp_path_factory):
    """Ten shards: embedding, five layers, the rest, three draft stages."""
    return write(tmp_path_factory.mktemp("dspark") / "v4")


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mtp") / "v4", "mtp")


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """(spec, folder) of a release at full size, data being holes; made when first asked for."""
    made = {}

    def make(dims: str, draft: str):
        if (dims, draft) not in made:
            spec = grammar.expand("native_fp4_fp8", dims, draft)
            config = grammar.config("native_fp4_fp8", dims, draft)
            folder = tmp_path_factory.mktemp("full-size") / f"{dims}-{draft}"
            made[dims, draft] = spec, grammar.write(folder, spec, config, grammar.by_layer(spec))
        return made[dims, draft]

    return make


def parameters(spec: grammar.Spec) -> int:
    """Elements of everything but scales and integer tables; a byte of a routed expert holds two."""
    return sum(
        math.prod(shape) * (2 if dtype == "I8" else 1)
        for name, (dtype, shape) in spec.items()
        if name.rpartition(".")[2] not in LABELS and dtype != "I64"
    )


def part(spec: grammar.Spec, draft: bool) -> grammar.Spec:
    return {name: value for name, value in spec.items() if name.startswith("mtp.") == draft}


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_sound_checkpoint(run, dspark):
    spec = grammar.expand("native_fp4_fp8", "tiny_flash", "dspark")
    report = run.json(dspark)
    assert report["refusals"] == []
    assert report["model"] == {
        "architecture": "DeepseekV4ForCausalLM",
        "family": "v4",
        "layers": 5,
        "experts": 8,
        "names": "native",
    }
    assert report["files"]["tensors"] == len(spec)
    assert report["files"]["bytes"] == grammar.nbytes(spec)
    assert report["files"]["shards"] == {"all": 10, "target": 7, "draft": 3}
    target, draft = report["layout"]["target"], report["layout"]["draft"]
    assert (target["experts"], target["expert_scale"], target["block"], target["wo_a"]) == (
        "FP4",
        "F8_E8M0",
        128,
        ["FP8"],
    )
    assert (draft["kind"], draft["stages"], draft["experts"], draft["loaded"]) == ("dspark", 3, "FP4", False)
    for half in ("target", "draft"):
        assert report["weights"][half] == {
            "parameters": parameters(part(spec, half == "draft")),
            "nbytes": grammar.nbytes(part(spec, half == "draft")),
        }


def test_the_table_ends_with_ok_and_the_launch_line(run, mtp):
    status, lines = run.text(mtp, "--pp-size", 2)
    assert status == 0
    assert lines[-2:] == [
        "OK",
        f"python -m sglang.launch_server --model-path {mtp} --model-impl sglang_dsv4 --pp-size 2",
    ]
    table = {line.split("  ")[0]: line for line in lines[:-2]}
    assert table["model"].endswith(f"{mtp}: DeepseekV4ForCausalLM, 5 layers, 8 experts")
    assert "experts FP4 (F8_E8M0 scales); other linears FP8 (128x128 blocks, F8_E8M0 scales)" in table["layout"]
    assert "mtp, 1 stage" in table["draft"]
    assert "in 8 shards; the target needs 7, its draft 1" in table["files"]
    assert "weights only: no KV cache, no activations" in table["per rank"]
    assert table["target experts"].endswith("fp4 (header)")
    assert table["target MoE runner"].endswith("auto -> flashinfer_mxfp4 (SGLang's default)")
    assert table["attn.wo_a"].endswith("fp8 -> bf16 in the stream (SGLang's default on sm90)")


def test_flags_are_read_from_the_environment(run, mtp, monkeypatch):
    monkeypatch.setenv("SGLANG_DSV4_FP4_DEQUANT", "1")
    report = run.json(mtp)
    assert {"what": "target experts", "value": "fp4 -> fp8 in the stream", "by": "SGLANG_DSV4_FP4_DEQUANT=1"} in report[
        "decisions"
    ]
    assert report["environment"]["SGLANG_DSV4_FP4_DEQUANT"] == "1"
    assert report["launch"].startswith("SGLANG_DSV4_FP4_DEQUANT=1 python -m sglang.launch_server ")


@pytest.mark.parametrize(
    ("layout", "names", "experts"),
    [
        ("native_base_fp8", "native", "FP8"),
        ("fp8_conversion_sgl", "native", "FP8"),
        ("nvfp4_modelopt", "modelopt", "NVFP4 (ModelOpt)"),
        ("transformers_bf16_per_expert", "transformers", "BF16"),
        ("transformers_fp8_per_expert", "transformers", "FP8"),
        ("transformers_saved_hybrid", "transformers-hybrid", "BF16"),
        ("v41_flash", "native", "FP4"),
    ],
)
def test_layouts_that_run(run, tmp_path, layout, names, experts):
    dims, draft = ("tiny_v41", "dspark") if layout == "v41_flash" else ("tiny_flash", grammar.groups(layout)[-1])
    spec = grammar.expand(layout, dims, draft)
    folder = grammar.write(tmp_path / "v4", spec, grammar.config(layout, dims, draft))
    report = run.json(folder, arch="sm100")
    assert report["refusals"] == []
    assert (report["model"]["names"], report["layout"]["target"]["experts"]) == (names, experts)
    assert report["files"]["bytes"] == grammar.nbytes(spec)


@pytest.mark.parametrize(
    ("dims", "draft", "tensors", "nbytes", "shards"),
    [
        ("flash", "mtp", 69_187, 159_609_485_896, {"all": 46, "target": 45, "draft": 1}),
        ("flash", "dspark", 72_317, 166_878_536_440, {"all": 48, "target": 45, "draft": 3}),
        ("pro", "dspark", 149_782, 892_727_580_904, {"all": 66, "target": 63, "draft": 3}),
    ],
)
def test_published_counts_at_full_size(run, full_size, dims, draft, tensors, nbytes, shards):
    spec, folder = full_size(dims, draft)
    report = run.json(folder, "--tp-size", 8)
    assert report["refusals"] == []
    assert (report["files"]["tensors"], report["files"]["bytes"]) == (tensors, nbytes)
    assert report["files"]["shards"] == shards
    assert report["weights"]["target"]["parameters"] == parameters(part(spec, draft=False))


# --- per rank ---------------------------------------------------------------------------------------------------------


def held(spec: grammar.Spec, *, tp: int, ep: int = 1, converted: bool = False) -> int:
    """Bytes of the target on one rank of one stage, from the list of what each rank has a part of. wo_a is BF16."""
    total = 0
    for name, (dtype, shape) in part(spec, draft=False).items():
        if name.endswith("attn.wo_a.scale"):
            continue
        nbytes = math.prod(shape) * grammar.BITS[dtype] // 8
        if name.endswith("attn.wo_a.weight"):
            nbytes *= 2
        expert = ".ffn.experts." in name
        if expert and converted:
            nbytes = nbytes * 2 if dtype == "I8" else math.ceil(shape[0] / 128) * math.ceil(shape[1] * 32 / 128)
        split = any(f".{piece}." in name for piece in ("attn.wq_b", "wo_a", "wo_b", "shared_experts"))
        split = split or name in ("embed.weight", "head.weight")
        total += nbytes // (tp if split or expert else 1)
    return total


@pytest.mark.parametrize(
    ("options", "flag", "expected"),
    [
        (["--tp-size", 8], "0", {"tp": 8}),
        (["--tp-size", 8, "--ep-size", 8], "0", {"tp": 8}),
        (["--tp-size", 4, "--ep-size", 2], "0", {"tp": 4}),
        (["--tp-size", 8], "1", {"tp": 8, "converted": True}),
    ],
)
def test_bytes_per_rank(run, full_size, monkeypatch, options, flag, expected):
    spec, folder = full_size("flash", "mtp")
    monkeypatch.setenv("SGLANG_DSV4_FP4_DEQUANT", flag)
    report = run.json(folder, *options)
    [stage] = report["weights"]["per_rank"]["target_by_pipeline_stage"]
    assert stage["nbytes"] == held(spec, **expected)


def test_pipeline_stages_share_the_layers(run, mtp):
    stages = run.json(mtp, "--pp-size", 2)["weights"]["per_rank"]["target_by_pipeline_stage"]
    spec = grammar.expand("native_fp4_fp8", "tiny_flash", "none")

    def stage_of(name):
        if not name.startswith("layers."):
            return 0 if name == "embed.weight" else 1
        return 0 if int(name.split(".")[1]) < 2 else 1  # SGLang gives the last stages what is left over

    for stage in range(2):
        mine = {name: value for name, value in spec.items() if stage_of(name) == stage}
        assert stages[stage]["nbytes"] == held(mine, tp=1)


def test_a_loaded_draft_is_counted(run, dspark):
    report = run.json(dspark, "--speculative-algorithm", "DSPARK")
    assert report["layout"]["draft"]["loaded"] is True
    draft = part(grammar.expand("native_fp4_fp8", "tiny_flash", "dspark"), draft=True)
    wo_a = sum(math.prod(shape) for name, (_, shape) in draft.items() if name.endswith("wo_a.weight"))
    scales = sum(math.prod(shape) for name, (_, shape) in draft.items() if name.endswith("wo_a.scale"))
    assert report["weights"]["per_rank"]["draft"]["nbytes"] == grammar.nbytes(draft) + wo_a - scales


# --- places -----------------------------------------------------------------------------------------------------------


def child(*arguments, **environment) -> dict:
    command = [sys.executable, "-m", "sglang_dsv4", "check", *map(str, arguments), "--arch", "sm90", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.stdout, done.stderr
    return json.loads(done.stdout) | {"status": done.returncode}


def hub_cache(root, folder, revision):
    """A snapshot as huggingface_hub keeps it: links to blobs, and a ref that names the revision."""
    repository = root / "models--someone--V4-Tiny"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for path in folder.iterdir():
        blob = repository / "blobs" / f"{revision}-{path.name}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return repository


def test_a_hub_id_in_the_local_cache(tmp_path, dspark):
    repository = hub_cache(tmp_path, dspark, "a" * 40)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    report = child("someone/V4-Tiny", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert report["status"] == 0
    assert report["files"]["tensors"] == len(grammar.expand("native_fp4_fp8", "tiny_flash", "dspark"))
    assert "--model-path someone/V4-Tiny " in report["launch"]
    snapshot = repository / "snapshots" / ("a" * 40)
    assert child(snapshot)["files"] == report["files"]
    assert child("someone/V4-Tiny", "--revision", "b" * 40, HF_HUB_CACHE=str(tmp_path))["status"] == 1


def test_object_storage_tells_the_same(run, dspark, monkeypatch):
    for flag in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "RUNAI_STREAMER_S3_ENDPOINT"):
        monkeypatch.delenv(flag, raising=False)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for flag, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(flag, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket="checked")
        for path in dspark.iterdir():
            client.upload_file(str(path), "checked", f"v4/{path.name}")
        remote, local = run.json("s3://checked/v4", "--pp-size", 2), run.json(dspark, "--pp-size", 2)
        client.delete_object(Bucket="checked", Key="v4/model-00003-of-00010.safetensors")
        [(code, message)] = run.refusals("s3://checked/v4")
    finally:
        server.stop()
    for key in ("ok", "model", "layout", "weights", "decisions", "notes", "refusals"):
        told = json.dumps(remote[key]).replace("s3://checked/v4", str(dspark))
        assert json.loads(told) == local[key], key
    assert remote["files"]["reads"] == 2 + 10  # config, index, and one range for each header
    assert code == "IndexMismatchError"
    assert "no file for 1 of 10 shards; found no model-00003-of-00010.safetensors" in message


# --- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--tp-size", 3), ("--speculative-algorithm", "EAGLE")])
def test_nothing_is_read_beyond_the_headers(run, dspark, monkeypatch, options):
    with reads(monkeypatch) as found:
        report = run.json(dspark, *options)
    shards = {path.name: header_end(path) for path in dspark.glob("*.safetensors")}
    assert {name for name, _, _ in found} == {"config.json", "model.safetensors.index.json", *shards}
    assert all(end <= shards[name] for name, _, end in found if name in shards)
    whole = sum((dspark / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    assert report["files"]["bytes_read"] == whole + sum(shards.values())


def test_neither_torch_nor_sglang_is_imported(dspark):
    script = (
        "import sys; from sglang_dsv4.cli.main import main; status = main(sys.argv[1:]); "
        "heavy = {'torch', 'sglang', 'numba', 'transformers', 'boto3'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else status)"
    )
    command = [sys.executable, "-c", script, "check", str(dspark), "--tp-size", "3", "--speculative-algorithm", "EAGLE"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["model", "--tp-size", "two"], ["model", "--moe-runner-backend", "fast"], ["model", "--arch", "sm61"]],
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    assert caught.value.code == 2
    assert "usage: sglang-dsv4 check" in capsys.readouterr().err


def test_options_are_sglangs_own():
    source = "\n".join(
        path.read_text() for path in (sglang_source.root() / "srt" / "arg_groups" / "fields").glob("*.py")
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    ours = {"help", "model", "arch", "json"}
    names = {action.dest for action in parser._actions} - ours
    assert {name for name in names if f"\n    {name}: " not in source} == set()


@pytest.mark.parametrize("arch_found", ["sm100", "gfx950"])
def test_the_gpu_that_is_there_is_judged(arch_found, monkeypatch):
    monkeypatch.setattr("sglang_dsv4.cli.check.detect_arch", lambda: arch_found)
    assert device(None) == (arch_found, "found here")
    assert device("cpu") == ("cpu", "--arch")


def test_without_a_gpu(run, mtp, monkeypatch):
    monkeypatch.setattr("sglang_dsv4.cli.check.detect_arch", lambda: "cpu")
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert run.json(mtp, arch=None)["device"] == {"arch": "sm90", "by": "assumed: no GPU here, --arch names another"}
    monkeypatch.setenv("SGLANG_PLATFORM", "dsv4_cpu")
    assert run.json(mtp, arch=None)["device"] == {"arch": "cpu", "by": "SGLANG_PLATFORM"}


def test_eagle_gets_the_options_that_fit(run, mtp):
    report = run.json(mtp, "--speculative-algorithm", "EAGLE", arch="sm100")
    options = shlex.split(report["launch"])
    for name, value in {"num-steps": "1", "eagle-topk": "1", "num-draft-tokens": "2"}.items():
        assert options[options.index(f"--speculative-{name}") + 1] == value
    assert run.refusals(mtp, "--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", 4)[0][0] == (
        "draft-eagle-options"
    )


def test_the_older_spelling_of_data_parallel_attention(run, mtp, monkeypatch):
    monkeypatch.setenv("SGLANG_SHARED_EXPERT_TP1", "1")
    sizes = ("--tp-size", 2, "--ep-size", 2)
    older = run.json(mtp, *sizes, "--dp-size", 2, "--enable-dp-attention")
    assert older["ok"]
    assert older["launch"] == run.json(mtp, *sizes, "--attn-dp-size", 2)["launch"]
    assert "--attn-dp-size 2" in older["launch"]


@pytest.mark.parametrize("layout", ["native_base_fp8", "ct_redhat_nvfp4_fp8"])
def test_what_sglang_holds_unquantised_is_counted_as_bf16(run, tmp_path, layout):
    draft = grammar.groups(layout)[-1]
    spec = grammar.expand(layout, "tiny_flash", draft)
    folder = grammar.write(tmp_path / "v4", spec, grammar.config(layout, "tiny_flash", draft))
    target, scales = part(spec, draft=False), (".scale", "_scale")
    grown = 0
    for module in {name.rpartition(".")[0] for name in target if name.endswith(scales)}:
        if not any(place in module for place in ("compressor", "weights_proj", "attn.wo_a", "shared_experts")):
            continue
        parts = {name: value for name, value in target.items() if name.rpartition(".")[0] == module}
        packed = f"{module}.weight_packed" in parts
        if "shared_experts" in module and not packed:
            continue
        [weight] = [shape for name, (_, shape) in parts.items() if name.endswith((".weight", ".weight_packed"))]
        grown += math.prod(weight) * (4 if packed else 2) - grammar.nbytes(parts)
    report = run.json(folder, arch="sm90")
    assert report["refusals"] == []
    [stage] = report["weights"]["per_rank"]["target_by_pipeline_stage"]
    assert stage["nbytes"] == grammar.nbytes(target) + grown
    assert grown > 0

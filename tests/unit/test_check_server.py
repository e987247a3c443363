"""What `check` says, the server says: every tiny layout and flag goes through SGLang's real argument resolution too.

Each launch is resolved in a fork of a warm process, where the parent of a server would be: no scheduler is started.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from check_runs import Run, header_end
from warm_python import WarmPython

from sglang_dsv4.checkpoint.tiny.layouts import LAYOUTS, Layout
from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

RESOLVE = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang_dsv4.models.loading.rank import server_arguments
arguments = prepare_server_args(server_arguments({model!r}, log_level="error") + {options!r})
arguments.resolve_once()
"""
FLAGS = ("", "SGLANG_DSV4_FP4_DEQUANT=1", "SGLANG_DSV4_FP4_EXPERTS=0")


def name_of(layout: Layout) -> str:
    return "-".join(word for word in (layout.names, layout.experts, layout.scales) if word)


@pytest.fixture(scope="module")
def warm():
    driver = WarmPython()
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny checkpoint in a layout, made once."""
    made = {}

    def make(layout: Layout) -> Path:
        name = name_of(layout)
        if name not in made:
            draft = layout.drafts[-1] if layout.drafts != ("none",) else None
            made[name] = tmp_path_factory.mktemp("tiny") / name
            make_tiny(made[name], Options(layout.names, layout.experts, layout.scales, draft=draft))
        return made[name]

    return make


@pytest.fixture
def run(capsys, monkeypatch):
    return Run(capsys, monkeypatch)


def same_answer(run, warm, monkeypatch, folder, flags: dict[str, str], options: list[str]) -> list[str]:
    """The refusals of both, after making sure that they are the same."""
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    refusals = [message for _, message in run.refusals(folder, *options, arch="cpu")]
    server = warm.run(RESOLVE.format(model=os.fspath(folder), options=options), **flags)
    assert (server.returncode == 0) == (not refusals), server.stderr[-3000:]
    lines = [line for message in refusals for line in message.splitlines()]
    assert [line for line in lines if line not in server.stderr] == []
    return refusals


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_layouts_and_flags(run, warm, tiny, monkeypatch, layout, flag):
    name, _, value = flag.partition("=")
    same_answer(run, warm, monkeypatch, tiny(layout), {name: value} if flag else {}, [])


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--tp-size", "3"], True),
        (["--tp-size", "0"], True),
        (["--tp-size", "2"], False),
        (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], False),
        (["--tp-size", "2", "--dcp-size", "2"], True),
        (["--moe-runner-backend", "megamoe"], True),
        (["--pp-size", "2"], False),
        (["--pp-size", "5"], True),
        (["--moe-runner-backend", "triton"], False),
        (["--moe-runner-backend", "marlin"], True),
        (["--moe-a2a-backend", "deepep", "--tp-size", "2"], True),
        (["--tp-size", "2", "--ep-size", "2", "--enforce-shared-experts-fusion"], True),
        (["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"], True),
        (["--speculative-algorithm", "NGRAM"], True),
    ],
)
def test_options(run, warm, tiny, monkeypatch, options, refused):
    folder = tiny(LAYOUTS[0])  # with a DSpark draft
    assert bool(same_answer(run, warm, monkeypatch, folder, {}, options)) == refused


def test_flags_that_cannot_be_read(run, warm, tiny, monkeypatch):
    [message] = same_answer(run, warm, monkeypatch, tiny(LAYOUTS[0]), {"SGLANG_DSV4_FP4_DEQUANT": "on"}, [])
    assert "found 'on'" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("rms_norm_eps", "x"),
        ("rope_theta", None),
        ("sliding_window", 0),
        ("hidden_act", "gelu"),
    ],
)
def test_a_config_that_sglang_would_stop_at(run, warm, tiny, monkeypatch, tmp_path, key, value):
    folder = tmp_path / "v4"
    shutil.copytree(tiny(LAYOUTS[0]), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    [message] = same_answer(run, warm, monkeypatch, folder, {}, [])
    assert f"{folder}/config.json: {key}; found " in message


def test_a_shard_cut_short(run, warm, monkeypatch, tmp_path):
    make_tiny(tmp_path / "v4", Options())
    last = sorted((tmp_path / "v4").glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    [message] = same_answer(run, warm, monkeypatch, tmp_path / "v4", {}, [])
    assert f"{last}: the shard is cut short" in message


def test_an_incomplete_checkpoint(run, warm, monkeypatch, tmp_path):
    make_tiny(tmp_path / "v4", Options())
    first = sorted((tmp_path / "v4").glob("*.safetensors"))[1]
    end = header_end(first)
    header = json.loads(first.read_bytes()[8:end])
    name = "layers.0.attn.q_norm.weight"
    header["layers.0.attn.query_norm.weight"] = header.pop(name)
    text = json.dumps(header).encode()
    data = first.read_bytes()[end:]
    first.write_bytes(len(text).to_bytes(8, "little") + text + data)
    for index in (tmp_path / "v4").glob("*.index.json"):
        index.write_text(index.read_text().replace(name, "layers.0.attn.query_norm.weight"))
    [message] = same_answer(run, warm, monkeypatch, tmp_path / "v4", {}, [])
    assert "missing: layers.0.attn.q_norm.weight" in message


def test_a_model_impl_that_almost_names_us(warm, tiny):
    """SGLang takes a word that it does not know for its own classes."""
    folder = os.fspath(tiny(LAYOUTS[0]))
    for almost in ("sglang_dvs4", "sglang-dsv4", "SGLANG_DSV4", "dsv4", "sglang_dsv4 "):
        refused = warm.run(RESOLVE.format(model=folder, options=["--model-impl", almost]))
        assert refused.returncode == 1
        assert f"--model-impl {almost!r} names no implementation; expected sglang_dsv4." in refused.stderr
    assert warm.run(RESOLVE.format(model=folder, options=["--model-impl", "sglang"])).returncode == 0


@pytest.mark.parametrize(
    ("dtype", "refused"), [("auto", False), ("bfloat16", False), ("half", True), ("float32", True)]
)
def test_dtypes_that_cannot_hold_the_weights(warm, tiny, dtype, refused):
    found = warm.run(RESOLVE.format(model=os.fspath(tiny(LAYOUTS[0])), options=["--dtype", dtype]))
    assert (found.returncode == 1) == refused
    assert (f"--dtype {dtype}: DeepSeek-V4 is loaded as bfloat16" in found.stderr) == refused

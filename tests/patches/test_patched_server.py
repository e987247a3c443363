"""A server on the patched SGLang, on the CPU platform and without the package, has loaded and says what it should."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from series_tools import ROOT, overlay

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

sys.path.append(str(ROOT / "tests" / "serving"))
import oracle
import servers

RECITING = ROOT / "tests" / "data" / "reciting"
KNOWN, PROMISED = 40, 120  # characters of the text: given, and asked for
MASK = "the package takes no part in this test"
DRAFT = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)
# where nothing else is said the platform keeps wo_a in FP8, and no table is used
FLAGS = {"SGLANG_OPT_FP8_WO_A_GEMM": "0"}


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The patched release; whatever imports the package beside it fails."""
    folder = tmp_path_factory.mktemp("patched")
    overlay.build(folder)
    (folder / "sglang_dsv4.py").write_text(f"raise ImportError({MASK!r})\n")
    return folder


def recite(patched: Path, checkpoint: Path, log: Path, flags: dict[str, str], arguments: Sequence[str] = ()) -> str:
    """Serve with upstream's own classes, ask for the promised text, and return the log."""
    isolated = {"PYTHONPATH": str(patched), "PYTHONSAFEPATH": "1", "SGLANG_PLUGINS": "dsv4_cpu"}
    env = isolated | flags | {"PYTHONDONTWRITEBYTECODE": "", "DSV4_CPU_DUMP_PARAMETERS": str(dump(log))}
    text = (RECITING / "promise.txt").read_text()
    with servers.serving(checkpoint, *arguments, log=log, model_impl=servers.UPSTREAM, env=env) as server:
        answer = server.generate(text[:KNOWN], PROMISED)
    assert answer["text"] == text[KNOWN : KNOWN + PROMISED]
    said = log.read_text(errors="replace")
    assert MASK not in said
    compiled = (patched / "sglang" / "srt" / "models" / "__pycache__").glob("deepseek_v4.*.pyc")
    assert [path.is_symlink() for path in compiled] == [False]  # the patched file is what was imported
    return said


def dump(log: Path) -> Path:
    return log.with_suffix(".safetensors")


@pytest.mark.in_turns(3)
def test_packed_experts_and_a_wo_a_by_table(patched, tmp_path):
    log = tmp_path / "packed.log"
    said = recite(patched, RECITING, log, FLAGS)
    assert "Finished streaming dequant fp8 wo_a" in said
    assert oracle.differences(oracle.state(RECITING), load_file(dump(log))) == []


@pytest.mark.in_turns(3)
def test_converted_experts_beside_a_draft(patched, tmp_path):
    """The target drops what is the draft's, the draft reads its own shards, and both convert their experts."""
    checkpoint, log = tmp_path / "checkpoint", tmp_path / "draft.log"
    make_tiny(checkpoint, Options(draft="mtp", source=RECITING))
    said = recite(patched, checkpoint, log, FLAGS | {"SGLANG_DSV4_FP4_DEQUANT": "1"}, DRAFT)
    assert "Dequantized FP4 expert weights to FP8." in said
    assert oracle.differences(oracle.state(checkpoint), load_file(dump(log))) == []
    assert (
        oracle.differences(oracle.draft_state(checkpoint), load_file(dump(log).with_suffix(".draft.safetensors"))) == []
    )


@pytest.mark.in_turns(3)
def test_a_contradiction_ends_the_start(patched, tmp_path):
    """Unpatched, SGLang overrules the one flag because the other is set, and serves."""
    flags = FLAGS | {"SGLANG_DSV4_FP4_EXPERTS": "0", "SGLANG_DSV4_FP4_DEQUANT": "0"}
    with pytest.raises(RuntimeError, match="SGLANG_DSV4_FP4_EXPERTS=0"):
        recite(patched, RECITING, tmp_path / "refused.log", flags)

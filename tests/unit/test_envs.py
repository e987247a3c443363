"""Environment flags: read as SGLang reads them, refused where it would guess."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys

import pytest
import sglang_source

from sglang_dsv4 import envs
from sglang_dsv4.errors import FlagError
from sglang_dsv4.spelling import edit_distance


@pytest.fixture(scope="module")
def upstream():
    """SGLang's environ module, loaded from its file alone (it needs only the standard library)."""
    spec = importlib.util.spec_from_file_location("sglang_environ", sglang_source.root() / "srt" / "environ.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SPELLINGS = ["1", "0", "true", "True", "FALSE", "yes", "no", "Y", "n", "on", "off", "", " 1", "2", "enable", "None"]


@pytest.mark.parametrize("text", SPELLINGS)
def test_booleans_are_read_as_sglang_reads_them(upstream, text):
    field = upstream.EnvBool(False)
    try:
        theirs = field.parse(text)
    except ValueError:
        theirs = None
    try:
        ours = envs.parse("SGLANG_X", "bool", text)
    except FlagError:
        ours = None
    assert ours == theirs


def test_defaults_are_sglangs(upstream):
    declared = vars(upstream.Envs)
    for flag in envs.FLAGS:
        if flag.owner == "SGLang":
            assert declared[flag.name].default == flag.default, flag.name


def test_upstream_flags_are_all_found_with_their_kind():
    source = (sglang_source.root() / "srt" / "environ.py").read_text()
    body = next(node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Envs")
    declared = {
        node.targets[0].id: node.value.func.id
        for node in body
        if isinstance(node, ast.Assign) and node.targets[0].id.startswith(("SGLANG_", "SGL_"))
    }
    found = envs.upstream_flags()
    assert set(found) == set(declared)
    for name, kind in declared.items():
        assert (found[name] == "bool") == kind.startswith("EnvBool"), name
        assert (found[name] == "int") == kind.startswith("EnvInt"), name


def test_unset_is_not_the_same_as_off():
    assert envs.FP4_DEQUANT.explicit({}) is None
    assert envs.FP4_DEQUANT.explicit({"SGLANG_DSV4_FP4_DEQUANT": "0"}) is False
    assert envs.FP4_DEQUANT.get({}) is False
    assert envs.FP4_EXPERTS.get({}) is True
    assert envs.FP4_EXPERTS.explicit({"SGLANG_DSV4_FP4_EXPERTS": "None"}) is None


def test_the_legacy_prefix_wins_as_in_sglang():
    assert envs.FP4_DEQUANT.get({"SGL_DSV4_FP4_DEQUANT": "1", "SGLANG_DSV4_FP4_DEQUANT": "0"}) is True


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("1000", 1000), ("3KiB", 3072), ("512 MiB", 512 << 20), ("2gib", 2 << 30)]
)
def test_bytes_take_binary_suffixes(text, count):
    assert envs.QUEUE_BYTES.get({envs.QUEUE_BYTES.name: text}) == count


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SGLANG_DSV4_FP4_DEQUANT", "on"),
        ("SGLANG_DSV4_PLUGIN_STRICT", ""),
        ("SGLANG_DSV4_PLUGIN_QUEUE_BYTES", "3 MB"),
        ("SGLANG_DSV4_PLUGIN_QUEUE_BYTES", "-1"),
        ("SGLANG_DSV4_PLUGIN_THREADS", "many"),
        ("SGLANG_DSV4_PLUGIN_THREADS", "-1"),
        ("SGLANG_DSV4_PLUGIN_FP4_ROUNDING", "up"),
        ("SGLANG_OPT_USE_TOPK_V2", "maybe"),
        ("SGL_DSV4_FP4_EXPERTS", "maybe"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_by_name(name, text):
    with pytest.raises(FlagError) as caught:
        envs.check_environment({name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)
    assert caught.value.expected
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SGLANG_DSV4_FP4_DEQUANTIZE", "SGLANG_DSV4_FP4_DEQUANT"),
        ("SGLANG_DSV4_DEQUANT", "SGLANG_DSV4_FP4_DEQUANT"),
        ("SGLANG_DSV4_DEQUANT_FP4", "SGLANG_DSV4_FP4_DEQUANT"),
        ("SGLANG_DSV4_FP4_EXPERT", "SGLANG_DSV4_FP4_EXPERTS"),
        ("SGLANG_DSV4_PF4_EXPERTS", "SGLANG_DSV4_FP4_EXPERTS"),
        ("SGLAN_DSV4_FP4_EXPERTS", "SGLANG_DSV4_FP4_EXPERTS"),
        ("SGLANG_OPT_FP8_WOA_GEMM", "SGLANG_OPT_FP8_WO_A_GEMM"),
        ("SGLANG_OPS_FP8_WO_A_GEMM", "SGLANG_OPT_FP8_WO_A_GEMM"),
        ("sglang_dsv4_fp4_experts", "SGLANG_DSV4_FP4_EXPERTS"),
        ("SGLANG_DSV4_PLUGIN_STRICTT", "SGLANG_DSV4_PLUGIN_STRICT"),
        ("SGLANG_USE_AITR", "SGLANG_USE_AITER"),
        ("SGL_USE_AITTER", "SGLANG_USE_AITER"),
        ("SGLANG_SHARED_EXPERTS_TP1", "SGLANG_SHARED_EXPERT_TP1"),
        ("SGLANG_ENABLE_JIT_DEEP_GEMM", "SGLANG_ENABLE_JIT_DEEPGEMM"),
        ("SGLANG_PLATFROM", "SGLANG_PLATFORM"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_right_one(name, meant):
    (error,) = envs.environment_errors({name: "1"})
    assert name in error.what
    assert error.expected == meant
    assert f"Did you mean {meant}?" in error.remedy


def test_an_unknown_name_with_our_prefix_is_always_refused():
    (error,) = envs.environment_errors({"SGLANG_DSV4_PLUGIN_SOMETHING_ELSE": "1"})
    assert "SGLANG_DSV4_PLUGIN_SOMETHING_ELSE" in error.what


def test_no_flag_that_sglang_has_is_called_misspelt():
    values = {"bool": "1", "int": "1"}
    environ = {name: values.get(kind, "x") for name, kind in envs.upstream_flags().items()}
    assert envs.environment_errors(environ) == []


def test_no_flag_that_sglang_reads_or_names_is_called_misspelt():
    """Those that no table declares too: kernels read them from os.environ, launchers write them."""
    sources = [path.read_text(encoding="utf-8") for path in sglang_source.root().rglob("*.py")]
    names = {name for text in sources for name in re.findall(r"[\"'](SGL(?:ANG)?_[A-Z][A-Z0-9_]*)[\"']", text)}
    declared = {*envs.upstream_flags(), *(flag.name for flag in envs.FLAGS)}
    assert len(names - declared) > 20
    assert envs.environment_errors(dict.fromkeys(names - declared, "x")) == []


def test_without_sglang_no_flag_of_it_is_close_to_one_of_ours():
    own = [spelling for flag in envs.FLAGS for spelling in flag.spellings]
    theirs = [name for name in envs.upstream_flags() if name not in own]
    assert [name for name in theirs if envs._nearly_in_the_table(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_DSV4_Q8KV8_PREFILL",  # read by a kernel, not declared
        "SGLANG_DSV4_GROUPED_ASM",
        "SGLANG_OPT_SWIGLU_CLAMP_FUSION",
        "SGLANG_SOMETHING_OF_SOMEBODY",
        "DEEPSEEK_PATH",
        "PATH",
    ],
)
def test_names_that_are_none_of_our_business_pass(name):
    assert envs.environment_errors({name: "x"}) == []


def test_all_faults_are_reported_together():
    with pytest.raises(FlagError) as caught:
        envs.check_environment({"SGLANG_DSV4_FP4_DEQUANT": "on", "SGLANG_DSV4_FP4_EXPERT": "1", "HOME": "/"})
    assert len(caught.value.details) == 2
    envs.check_environment({"SGLANG_DSV4_FP4_DEQUANT": "1"})


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("kitten", "sitting", 3), ("", "xyz", 3)],
)
def test_edit_distance(one, other, steps):
    assert edit_distance(one, other) == edit_distance(other, one) == steps


def test_the_table_names_every_flag_once():
    table = envs.markdown_table()
    for flag in envs.FLAGS:
        assert table.count(f"`{flag.name}`") == 1
        assert flag.meaning in table
    assert len({flag.name for flag in envs.FLAGS}) == len(envs.FLAGS)


def test_reading_flags_imports_neither_torch_nor_sglang():
    code = (
        "import sys; from sglang_dsv4 import envs; from sglang_dsv4.decisions import decide, suggest, arch; "
        "envs.check_environment(); arch.detect_arch(); sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

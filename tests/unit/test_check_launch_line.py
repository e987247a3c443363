"""The line that `check` prints: it works where it is printed, and what starts a server can be pasted after `check`."""

import ast
import os
import shlex
import subprocess
import sys

import pytest
import sglang_source
from check_runs import Run

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny
from sglang_dsv4.cli.check.arguments import add_arguments, apart, usage_fault
from sglang_dsv4.cli.main import build_parser, main


@pytest.fixture
def run(capsys, monkeypatch):
    return Run(capsys, monkeypatch)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    """Wide enough for two ranks."""
    folder = tmp_path_factory.mktemp("mtp") / "v4"
    make_tiny(folder, Options(draft="mtp", sparse=True))
    return folder


def sglangs_options() -> dict[str, set[str]]:
    """Field of the configuration -> the spellings of its option, from SGLang's source."""
    found: dict[str, set[str]] = {}
    for path in (sglang_source.root() / "srt" / "arg_groups" / "fields").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                aliases = {
                    element.value
                    for call in ast.walk(node.annotation)
                    for keyword in getattr(call, "keywords", [])
                    if keyword.arg in ("aliases", "cli_name")
                    for element in ast.walk(keyword.value)
                    if isinstance(element, ast.Constant)
                }
                found[node.target.id] = {f"--{node.target.id.replace('_', '-')}", *aliases}
    return found


# --- pasted -----------------------------------------------------------------------------------------------------------

PASTED = [
    [],
    ["--tp-size", "2", "--ep-size", "2", "--moe-runner-backend", "marlin"],
    ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1"],
    ["--tp-size", "2", "--attn-dp-size", "2", "--kv-cache-dtype", "fp8_e4m3", "--trust-remote-code"],
    ["--revision", "main", "--dtype", "bfloat16", "--served-model-name", "two words", "--nnodes=1"],
    ["--tp-size", "2", "--enable-prefill-cp", "--disaggregation-mode", "prefill"],
]


@pytest.mark.parametrize("options", PASTED)
def test_the_line_can_be_pasted(run, mtp, options):
    first = run.json(mtp, *options)
    assert first["refusals"] == []
    again = run.json(*run.pasted(first["launch"]))
    told = ("ok", "path", "decisions", "weights", "notes", "not_judged", "launch")
    assert {key: again[key] for key in told} == {key: first[key] for key in told}
    line = shlex.split(first["launch"])
    assert [word for word in options if word not in line] == []


def test_what_is_not_judged_is_said(run, mtp):
    given = ("--kv-cache-dtype", "fp8_e4m3", "--trust-remote-code", "--json-model-override-args", '{"a": 1}')
    told = ["--kv-cache-dtype fp8_e4m3", "--trust-remote-code", "--json-model-override-args '{\"a\": 1}'"]
    report = run.json(*given, "--tp-size", 1, "--model-path", mtp, "--nnodes", "2")
    assert report["not_judged"] == [*told, "--nnodes 2"]
    _, lines = run.text(mtp, *given)
    notes = [line.removeprefix("note").strip() for line in lines if line.startswith("note")]
    assert f"not judged: {', '.join(told)}" in notes
    assert run.json(mtp)["not_judged"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["v4", "--enable-dp-atention"], "unknown option --enable-dp-atention: did you mean --enable-dp-attention?"),
        (["v4", "--tp-sise=8"], "unknown option --tp-sise: did you mean --tp-size?"),
        (["v4", "--moe-runer-backend", "auto"], "did you mean --moe-runner-backend?"),
        (["v4", "--model-impl", "sglang"], "invalid choice: 'sglang'"),
        (["v4", "--model-path", "other"], "two models: v4 and --model-path other"),
        ([], "no model: name it first, or with --model-path"),
        (["--trust-remote-code", "v4"], "no model: name it first before --trust-remote-code, or with --model-path"),
    ],
)
def test_usage_errors(capsys, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: sglang-dsv4 check ")
    assert said in err


def test_no_option_of_sglang_is_called_misspelt_or_taken_for_another():
    spelled = sglangs_options()
    assert len(spelled) > 400
    judged = {action.dest: set(action.option_strings) for action in add_arguments(build_parser())}
    for field, options in spelled.items():
        for option in options:
            ours, others = apart([option])
            if field in judged:
                assert option in judged[field], f"{option} would not be judged"
            else:
                assert ours == [], f"{option} would be taken for an abbreviation"
                args = build_parser().parse_args(["check", "v4"])
                assert usage_fault(args, others) is None


def test_load_says_where_sglangs_options_go(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["load", "v4", "--kv-cache-dtype", "fp8_e4m3"])
    assert ended.value.code == 2
    said = "unrecognized arguments: --kv-cache-dtype fp8_e4m3; put SGLang's own options after --\n"
    assert capsys.readouterr().err.endswith(said)


def test_the_older_spelling_is_told(run, mtp):
    told = "--dp-size 2 --enable-dp-attention is the older spelling of --attn-dp-size 2"
    report = run.json(mtp, "--tp-size", 2, "--dp-size", 2, "--enable-dp-attention")
    assert told in report["notes"]
    assert "--attn-dp-size 2" in report["launch"]
    assert told not in run.json(mtp, "--tp-size", 2, "--attn-dp-size", 2)["notes"]


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_megamoe_as_a_runner_is_the_all_to_all(run, mtp, arch):
    """Which sets EP to TP: the same parts on each rank, and the same answer."""
    as_runner = run.json(mtp, "--tp-size", 2, "--moe-runner-backend", "megamoe", arch=arch)
    as_a2a = run.json(mtp, "--tp-size", 2, "--moe-a2a-backend", "megamoe", arch=arch)
    assert as_runner["ok"] == as_a2a["ok"] == (arch == "sm100")
    assert as_runner["weights"] == as_a2a["weights"]
    assert "--moe-a2a-backend" not in as_runner["launch"]
    for refusal in as_runner["refusals"]:
        assert "--moe-a2a-backend" not in refusal["message"]
    assert "--moe-runner-backend megamoe" in as_runner["launch"]


# --- in the shell at hand ---------------------------------------------------------------------------------------------


def test_the_line_unsets_what_was_refused(run, mtp, monkeypatch):
    """In a real shell: the words before `python` leave an environment that `check` accepts."""
    monkeypatch.setenv("SGLANG_DSV4_FP4_EXPERTS", "0")
    report = run.json(mtp, "--tp-size", 2)
    assert report["refusals"][0]["code"] == "experts-flag-contradicts-header"
    assert report["launch"].startswith("env -u SGLANG_DSV4_FP4_EXPERTS python -m sglang.launch_server ")
    checks = f"{sys.executable} -m sglang_dsv4 check --arch sm90"
    line = report["launch"].replace("python -m sglang.launch_server", checks)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout
    refused = subprocess.run(line.partition("EXPERTS ")[2], shell=True, capture_output=True, check=False)
    assert refused.returncode == 1


@pytest.mark.parametrize(("named", "platform"), [(None, "dsv4_cpu"), ("another_cpu", "another_cpu")])
def test_a_launch_on_a_cpu_names_the_platform(run, mtp, monkeypatch, named, platform):
    if named is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", named)
    assert run.json(mtp, arch="cpu")["launch"].startswith(f"SGLANG_PLATFORM={platform} python -m sglang.launch_server ")


@pytest.mark.parametrize(
    ("arch", "listed", "missing", "start"),
    [
        ("sm90", "other", ["without sglang_dsv4"], "SGLANG_PLUGINS=other,sglang_dsv4 python"),
        ("sm90", "other, sglang_dsv4", [], "python"),
        (
            "cpu",
            "sglang_dsv4",
            ["not load its CPU platform"],
            "SGLANG_PLATFORM=dsv4_cpu SGLANG_PLUGINS=sglang_dsv4,dsv4_cpu python",
        ),
        (
            "cpu",
            "other",
            ["without sglang_dsv4", "not load its CPU platform"],
            "SGLANG_PLATFORM=dsv4_cpu SGLANG_PLUGINS=other,sglang_dsv4,dsv4_cpu python",
        ),
    ],
)
def test_a_list_of_plugins_without_us(run, mtp, monkeypatch, arch, listed, missing, start):
    monkeypatch.setenv("SGLANG_PLUGINS", listed)
    report = run.json(mtp, arch=arch)
    assert [refusal["code"] for refusal in report["refusals"]] == ["plugin-list"] * len(missing)
    for refusal, words in zip(report["refusals"], missing, strict=True):
        assert words in refusal["what"]
    assert report["launch"].startswith(f"{start} -m sglang.launch_server ")
    given = run.pasted(report["launch"])
    assert run.json(*given, arch=arch)["refusals"] == []


def test_a_list_of_plugins_is_refused_in_the_words_of_load(run, mtp, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    [(_, message)] = run.refusals(mtp)
    assert main(["load", str(mtp)]) == 1
    assert message in capsys.readouterr().err


# --- counts -----------------------------------------------------------------------------------------------------------


def test_one_is_no_plural(run, tmp_path):
    folder = tmp_path / "v4"
    assert main(["make-tiny", str(folder), "--sparse", "--shards", "1", "--draft", "mtp"]) == 0
    run.capsys.readouterr()
    _, lines = run.text(folder)
    assert any("bytes in 1 shard;" in line for line in lines)
    assert any("mtp, 1 stage;" in line for line in lines)

"""What the command line does when the world around it fails: one line and a status, never a traceback."""

import json
import os
import signal
import subprocess
import sys

import pytest

from sglang_dsv4.cli import installed
from sglang_dsv4.cli.main import main

COMMAND = [sys.executable, "-m", "sglang_dsv4"]
RANKS = {
    "tp rank beyond": (["--tp-rank", "1"], "--tp-rank 1 is no rank"),
    "tp rank below": (["--tp-size", "2", "--tp-rank", "-1"], "--tp-rank -1 is no rank"),
    "pp rank beyond": (["--pp-size", "2", "--pp-rank", "2"], "--pp-rank 2 is no rank"),
    "no rank at all": (["--tp-size", "0"], "--tp-size of 1 or more"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    assert main(["make-tiny", str(folder), "--sparse"]) == 0
    return folder


@pytest.mark.parametrize(("options", "said"), RANKS.values(), ids=RANKS)
def test_a_rank_that_is_none_is_refused_before_anything_is_read(capsys, tmp_path, options, said):
    assert main(["load", str(tmp_path / "nowhere"), *options]) == 1
    err = capsys.readouterr().err
    assert err.startswith("sglang_dsv4: ")
    assert said in err


def test_a_checkpoint_without_a_draft_is_refused_before_sglang_starts(capsys, monkeypatch, checkpoint):
    monkeypatch.setenv("SGLANG_PLATFORM", "dsv4_cpu")
    assert main(["load", str(checkpoint), "--draft"]) == 1
    assert f"sglang_dsv4: {checkpoint} bundles no draft to load" in capsys.readouterr().err


def test_a_load_that_sglang_would_do_without_us_is_refused(capsys, monkeypatch, checkpoint):
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    assert main(["load", str(checkpoint)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("sglang_dsv4: SGLang would load this model without sglang_dsv4")
    assert "SGLANG_PLUGINS: lists another" in err


def test_a_package_that_is_not_installed_is_told_once(monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert [finding.state for finding in installed.registration()] == ["ok"]
    monkeypatch.setattr(installed, "entry_points", lambda *, group: [])
    assert [(finding.state, finding.subject) for finding in installed.registration()] == [("stop", "entry point")]


def test_a_load_without_the_cpu_platform_is_refused(capsys, monkeypatch, checkpoint):
    monkeypatch.setenv("SGLANG_PLATFORM", "dsv4_cpu")
    monkeypatch.setenv("SGLANG_PLUGINS", "sglang_dsv4, another")
    assert main(["load", str(checkpoint)]) == 1
    err = capsys.readouterr().err
    assert "SGLANG_PLUGINS: lists sglang_dsv4, another and leaves out dsv4_cpu: add it" in err


@pytest.mark.parametrize("command", ["check", "load"])
def test_an_empty_model_path_is_refused(capsys, command):
    assert main([command, ""]) == 1
    said = capsys.readouterr()
    assert "the model path is empty. Name a folder" in said.out + said.err


@pytest.mark.parametrize("place", ["absent/digests.json", "."])
def test_digests_that_cannot_be_written_are_refused_before_the_load(capsys, tmp_path, place):
    assert main(["load", str(tmp_path / "nowhere"), "--digests", str(tmp_path / place)]) == 1
    assert f"sglang_dsv4: --digests {tmp_path / place} cannot be written" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(capsys, tmp_path):
    (tmp_path / "file").touch()
    assert main(["make-tiny", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"sglang_dsv4: {tmp_path / 'file'}: Not a directory\n"


@pytest.mark.parametrize("what", ["check", "load MODEL", "update MODEL", "dequant"])
def test_a_benchmark_of_no_runs_is_a_usage_error(capsys, what):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *what.split(), "--repeat", "0"])
    assert ended.value.code == 2
    assert "argument --repeat: '0' is no positive number" in capsys.readouterr().err


def test_a_benchmark_says_why_there_is_none(capsys, tmp_path):
    assert main(["bench", "check", str(tmp_path / "nowhere"), "--repeat", "1"]) == 1
    err = capsys.readouterr().err
    assert f"sglang_dsv4: {tmp_path / 'nowhere'} cannot be measured: check ends with status 1" in err
    assert "no such model folder" in err


def test_a_refused_load_is_json_too(capsys, tmp_path):
    assert main(["load", str(tmp_path / "nowhere"), "--tp-rank", "2", "--json"]) == 1
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert not report["ok"]
    [refusal] = report["refusals"]
    assert refusal["code"] == "FlagError"
    assert said.err == f"sglang_dsv4: {refusal['message']}\n"


def test_a_negative_seed_is_a_usage_error(capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["make-tiny", str(tmp_path / "out"), "--seed", "-1"])
    assert ended.value.code == 2
    assert "expected an integer of 0 or more, found '-1'" in capsys.readouterr().err


def test_a_full_disk_behind_stdout_is_said(checkpoint):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*COMMAND, "check", checkpoint], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "sglang_dsv4: the output: No space left on device\n"


def test_a_reader_that_goes_away_is_no_fault_to_speak_of(checkpoint):
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([*COMMAND, "check", checkpoint], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert ended.returncode == 1
    assert ended.stderr == ""


def test_an_interrupt_ends_the_command_with_one_line():
    code = """
import sys, time
from sglang_dsv4.cli import check, main
def run(args):
    print("running", flush=True)
    time.sleep(60)
check.run = run
sys.exit(main.main(["check", "anywhere"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as it:
        assert it.stdout.readline() == "running\n"
        it.send_signal(signal.SIGINT)
        _, err = it.communicate(timeout=30)
    assert it.returncode == 1
    assert err == "sglang_dsv4: interrupted\n"

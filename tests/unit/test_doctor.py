"""`sglang-dsv4 doctor`: what it says of the device, and that what would stop a start decides its status."""

import json
import os
import subprocess
import sys

import pytest
import torch

from sglang_dsv4.cli import doctor, installed


@pytest.fixture
def machine(monkeypatch):
    """A machine with these GPUs and installed platforms, and these flags."""

    def make(gpus=(), platforms=(), **flags):
        for name in ("SGLANG_PLATFORM", "SGLANG_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in flags.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index])
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
        monkeypatch.setattr(doctor, "platforms", lambda: set(platforms))
        return list(doctor.device())

    return make


def test_no_gpu_and_no_platform_stops_a_start(machine):
    [finding] = machine(platforms=["dsv4_cpu"])
    assert finding.state == "stop"
    assert finding.text == "no GPU: set SGLANG_PLATFORM=dsv4_cpu to serve on the CPU; that platform is installed"
    [finding] = machine()
    assert finding.state == "stop"
    assert "SGLANG_PLATFORM=dsv4_cpu" in finding.text
    assert "is not installed (from a checkout of this project: pip install -e ci/cpu_platform)" in finding.text


def test_the_cpu_platform_does(machine):
    [finding] = machine(platforms=["dsv4_cpu"], SGLANG_PLATFORM="dsv4_cpu")
    assert (finding.state, finding.text) == ("ok", "the platform dsv4_cpu, as SGLANG_PLATFORM says")


@pytest.mark.parametrize("gpus", [(), ("H200",)])
def test_a_platform_that_is_not_installed_stops_a_start(machine, gpus):
    [finding] = machine(gpus, ["other"], SGLANG_PLATFORM="dsv4_cpu")
    assert (finding.state, finding.subject) == ("stop", "SGLANG_PLATFORM")
    assert "dsv4_cpu is not installed; there is other: " in finding.text


def test_a_list_of_plugins_without_the_cpu_platform_stops_a_start(machine):
    _, finding = machine(platforms=["dsv4_cpu"], SGLANG_PLATFORM="dsv4_cpu", SGLANG_PLUGINS="sglang_dsv4")
    assert (finding.state, finding.subject) == ("stop", "SGLANG_PLUGINS")
    assert finding.text == "lists sglang_dsv4 and leaves out dsv4_cpu: add it"


def test_gpus_are_named_and_counted(machine):
    [finding] = machine(["H200", "H200"])
    assert finding == ("ok", "device", "2 x H200")


def test_the_installed_platforms_are_found():
    assert "dsv4_cpu" in installed.platforms()


def test_the_status_is_what_would_stop_a_start():
    names = ("SGLANG_PLATFORM", "SGLANG_PLUGINS")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-m", "sglang_dsv4", "doctor", "--json"]
    flags = {"SGLANG_PLATFORM": "dsv4_cpu", "SGLANG_PLUGINS": "dsv4_cpu, other"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean | flags)
    report = json.loads(done.stdout)
    stops = [finding for finding in report["findings"] if finding["state"] == "stop"]
    assert (done.returncode, report["ok"]) == (1, False)
    assert [(stop["subject"], stop["text"]) for stop in stops] == [
        ("SGLANG_PLUGINS", "lists dsv4_cpu, other and leaves out sglang_dsv4: add it")
    ]

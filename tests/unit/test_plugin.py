"""The gate: nothing happens unasked, and asked for, everything is proven or the start stops.

Each case runs in a process of its own: hooks, registries and environment flags are process state. What has to be seen
from a bare interpreter starts one; the rest runs in forks of a warm one.
"""

import configparser
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from warm_python import Run, WarmPython

from sglang_dsv4 import compat

ROOT = Path(__file__).parents[2]
MARKER = "SGLANG_DSV4_PLUGIN_ENGAGED"


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter on the CPU platform, without what an outer test run may have left."""
    clean = {name: value for name, value in os.environ.items() if name != MARKER and not name.startswith("SGLANG_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=clean | {"SGLANG_PLATFORM": "dsv4_cpu", "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_line(run: subprocess.CompletedProcess | Run) -> object:
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmPython]:
    driver = WarmPython()
    yield driver
    driver.close()


def test_importing_the_package_imports_neither_torch_nor_sglang():
    found = last_line(
        python(
            "import sys, json, sglang_dsv4, sglang_dsv4.plugin, sglang_dsv4.compat, sglang_dsv4.envs\n"
            "import sglang_dsv4.cli.main as main; main.build_parser()\n"
            "print(json.dumps([name for name in ('torch', 'sglang', 'numpy', 'transformers') if name in sys.modules]))"
        )
    )
    assert found == []


def test_register_unasked_imports_a_few_small_modules_and_changes_no_function():
    """Beyond what SGLang's plugin loader has: its own table of resolution hooks, and what register() needs of ours."""
    found = last_line(
        python(
            """
import sys, json
import sglang.srt.plugins as plugins
before = set(sys.modules)
from sglang_dsv4 import plugin
plugin.register()
new = sorted(set(sys.modules) - before)
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps([new, sorted(HookRegistry._hooks)]))
"""
        )
    )
    assert found == [
        [
            "sglang.srt.arg_groups.resolution_hooks",
            "sglang_dsv4",
            "sglang_dsv4.compat",
            "sglang_dsv4.compat_updates",
            "sglang_dsv4.envs",
            "sglang_dsv4.errors",
            "sglang_dsv4.plugin",
            "sglang_dsv4.spelling",
        ],
        [],
    ]


RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
{setup}
from sglang.srt.server_args import prepare_server_args
arguments = prepare_server_args({arguments})
arguments.resolve_once()
from sglang.srt.model_loader import utils
from sglang.srt.configs.model_config import ModelConfig
built = utils.get_model_architecture(ModelConfig.from_server_args(arguments))[0]
print(json.dumps([built.__module__, "{marker}" in os.environ, arguments.moe_runner_backend]))
"""


def resolve(warm: WarmPython, checkpoint: Path, *arguments: str, setup: str = "", **env: str) -> Run:
    given = ["--model-path", str(checkpoint), *arguments]
    return warm.run(RESOLVE.format(setup=setup, arguments=given, marker=MARKER), **env)


def test_installed_but_not_asked_for_upstream_is_built(warm, tiny_checkpoint):
    assert last_line(resolve(warm, tiny_checkpoint)) == ["sglang.srt.models.deepseek_v4", False, "auto"]


def test_asked_for_our_class_is_built_and_children_are_told(warm, tiny_checkpoint):
    found = last_line(resolve(warm, tiny_checkpoint, "--model-impl", "sglang_dsv4"))
    assert found == ["sglang_dsv4.models.deepseek_v4", True, "auto"]


def test_the_external_package_selects_our_class_as_well(warm, tiny_checkpoint):
    found = last_line(resolve(warm, tiny_checkpoint, SGLANG_EXTERNAL_MODEL_PACKAGE="sglang_dsv4.models"))
    assert found == ["sglang_dsv4.models.deepseek_v4", True, "auto"]


def test_the_external_package_works_where_no_plugin_is_loaded(warm):
    code = """
import json
from sglang.srt.models.registry import ModelRegistry
names = ["DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"]
print(json.dumps([ModelRegistry.resolve_model_cls([name])[0].__module__ for name in names]))
"""
    found = last_line(warm.run(code, SGLANG_EXTERNAL_MODEL_PACKAGE="sglang_dsv4.models", SGLANG_PLUGINS="none"))
    assert found == [
        "sglang_dsv4.models.deepseek_v4",
        "sglang_dsv4.models.deepseek_v4_nextn",
        "sglang_dsv4.models.deepseek_v4_dspark",
    ]


BROKEN = {
    "a name that is gone": (
        "import dataclasses; from sglang_dsv4 import compat\n"
        "compat.SEAMS = (*compat.SEAMS, dataclasses.replace(compat.SEAMS[-1], target='sglang.srt.no_such_name'))",
        "sglang.srt.no_such_name cannot be resolved",
    ),
    "a signature that changed": (
        "import dataclasses; from sglang_dsv4 import compat\n"
        "compat.SEAMS = tuple(dataclasses.replace(seam, parameters=('other',)) if seam.kind == 'after' else seam"
        " for seam in compat.SEAMS)",
        "the signature of sglang.srt.model_loader.utils.get_model_architecture changed",
    ),
    "a hook that does not take": (
        "from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "HookRegistry.register('sglang.srt.model_loader.utils.get_model_architecture', lambda result, *a, **k: None,"
        " HookType.AFTER); HookRegistry.apply_hooks()",
        "the hook on sglang.srt.model_loader.utils.get_model_architecture did not take",
    ),
    "an unsupported release": (
        "from sglang_dsv4 import compat; compat.SUPPORTED = '>=0.1,<0.2'",
        "does not support this SGLang release; found sglang 0.5.23; expected sglang>=0.1,<0.2",
    ),
}


@pytest.mark.parametrize(("setup", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_hook_table_stops_the_start_with_one_message(warm, tiny_checkpoint, setup, message):
    run = resolve(warm, tiny_checkpoint, "--model-impl", "sglang_dsv4", setup=setup)
    assert run.returncode == 1
    lines = [line for line in run.stderr.splitlines() if line.startswith("sglang_dsv4: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("setup", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_child_of_an_engaged_parent_ends_instead_of_going_on_without_us(warm, setup, message):
    """SGLang swallows any Exception of a plugin; only SystemExit ends the process."""
    code = f"{setup}\nfrom sglang.srt.plugins import load_plugins\nload_plugins()\nprint('went on')"
    run = warm.run(code, **{MARKER: "1"})
    assert run.returncode == 1
    assert "went on" not in run.stdout
    assert any(line.startswith("sglang_dsv4: ") and message in line for line in run.stderr.splitlines())


def test_a_release_without_resolution_steps_is_refused_when_we_are_asked_for(warm, tiny_checkpoint):
    """SGLang 0.5.19 and older have no such steps; reading the command line ends the start there."""
    code = """
from sglang_dsv4 import compat, plugin
compat.RESOLUTION_STEPS = compat.OVERRIDABLE_STEPS = "sglang.srt.arg_groups.no_such_module.hook"
compat.SUPPORTED = ">=0.5.20,<0.5.21"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
print(prepare_server_args(["--model-path", "{path}"]).model_impl)
prepare_server_args(["--model-path", "{path}", "--model-impl", "sglang_dsv4"])
print("went on")
""".replace("{path}", str(tiny_checkpoint))
    run = warm.run(code)
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1] == "auto"
    assert "sglang_dsv4: --model-impl sglang_dsv4 does not support this SGLang release" in run.stderr


def test_another_architecture_under_our_word_is_refused(warm, tmp_path, tiny_checkpoint):
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = resolve(warm, tmp_path, "--model-impl", "sglang_dsv4")
    assert run.returncode == 1
    assert "sglang_dsv4: " in run.stderr
    assert "LlamaForCausalLM" in run.stderr


def test_setup_cfg_and_compat_agree_on_the_lower_bound():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    required = metadata["options"]["install_requires"].split()
    (bound,) = [line.removeprefix("sglang") for line in required if line.startswith("sglang")]
    lower = [str(part) for part in SpecifierSet(compat.SUPPORTED) if part.operator == ">="]
    assert [bound] == lower
    assert compat.PINNED in SpecifierSet(compat.SUPPORTED)


def test_what_setup_installs_is_the_release_that_is_said_to_be_tested():
    assert f"\nsglang={compat.PINNED}\n" in (ROOT / "ci" / "setup").read_text()

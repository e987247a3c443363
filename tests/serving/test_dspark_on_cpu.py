"""How far a DSpark draft goes without a GPU: SGLang's own worker loads it on every rank, and stops at the first prompt.

SGLang serves DSpark on GPUs only and says so, as this package does; nobody is told otherwise. Here both refusals are
passed over, and the platform's, to run the real worker on two ranks as far as it gets. It ends where kernels for a GPU
begin; nothing stands in for them. Runs with ``--thorough``.
"""

from http.client import HTTPException
from pathlib import Path

import pytest
import servers
from launches import DISTRIBUTED, STREAMED, TP2, Report, reports

from sglang_dsv4.checkpoint.tiny.make import Options, make_tiny

BEYOND_REFUSALS = """
import runpy
import sys


class SeenAsCuda:
    def __init__(self, view):
        self._view = view

    def __getattr__(self, name):
        return "cuda" if name == "device" else getattr(self._view, name)


def pass_over_refusals():
    import sglang.srt.arg_groups.speculative_hook as sglang
    from dsv4_cpu_platform.platform import Dsv4CpuPlatform
    from sglang_dsv4.decisions import drafts

    view, check, refusals = sglang.resolving_view, sglang._handle_dspark, drafts.dspark_refusals

    def without_the_device(server_args):
        sglang.resolving_view = lambda args: SeenAsCuda(view(args))
        try:
            return check(server_args)
        finally:
            sglang.resolving_view = view

    sglang._handle_dspark = without_the_device
    Dsv4CpuPlatform.supports_speculative_algorithm = lambda self, algorithm: True
    drafts.dspark_refusals = lambda *args, **kw: (one for one in refusals(*args, **kw) if one.code != "draft-device")


if __name__ == "__main__":
    pass_over_refusals()
    runpy.run_module("sglang.launch_server", run_name="__main__")
"""


@pytest.mark.thorough
def test_the_real_worker_loads_a_draft_and_stops_at_its_first_kernel(checkpoint: Path, tmp_path: Path) -> None:
    folder, script, log = tmp_path / "checkpoint", tmp_path / "beyond_refusals.py", tmp_path / "log"
    make_tiny(folder, Options(draft="dspark", source=checkpoint))
    script.write_text(BEYOND_REFUSALS)
    arguments = (*TP2, *STREAMED, *DISTRIBUTED, "--speculative-algorithm", "DSPARK", "--skip-server-warmup")
    env = {"RUNAI_STREAMER_DIST": "1"}
    with servers.serving(folder, *arguments, log=log, env=env, timeout=480, start=(str(script),)) as server:
        target = "DeepseekV4ForCausalLM"
        assert sorted(reports(log)) == sorted(
            Report(rank, model, "RunAI streamer, distributed")
            for rank in ("TP0", "TP1")
            for model in (target, f"{target}DSpark")
        )
        assert f"Initialized DSpark draft runner. attention_backend=dsv4, model={target}DSpark" in log.read_text()
        with pytest.raises((OSError, HTTPException)):
            server.generate("what", 2)
        # the hidden states that the target hands over go into a projection whose FP8 kernel is triton's
        said = log.read_text()
        assert "in write_target_hidden_kv" in said
        assert "in project_target_hidden" in said

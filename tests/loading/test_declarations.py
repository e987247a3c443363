"""What a decision declares reaches SGLang's resolved arguments. The device is faked: nothing is declared for a CPU."""

from unittest.mock import patch

import pytest


def resolved(model: str, arch: str, option: str) -> str:
    """An option as SGLang has resolved it, of a launch that believes itself on this (faked) arch."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dsv4.models.loading.rank import parallel_context, server_arguments

    with (
        patch.dict("os.environ"),  # a decision writes flags for the children of its process
        patch("sglang_dsv4.decisions.resolution.detect_arch", lambda: arch),
        parallel_context([*server_arguments(model, log_level="error")]) as server_args,
    ):
        return getattr(resolving_view(server_args), option)


@pytest.mark.parametrize(("arch", "runner"), [("sm90", "marlin"), ("sm120", "flashinfer_cutlass")])
def test_the_runner_that_we_choose_is_the_one_that_sglang_runs(loader, made, arch, runner):
    checkpoint = made(expert_format="nvfp4")
    assert loader.run(resolved, str(checkpoint), arch, "moe_runner_backend") == runner

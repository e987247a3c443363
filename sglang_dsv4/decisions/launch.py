"""A launch from its arguments to what is decided on: the same steps for the server and for `check`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.preflight import Inspection, survey
from sglang_dsv4.decisions.checkpoints import draft_faults, target_faults
from sglang_dsv4.decisions.decide import Flags, Inputs
from sglang_dsv4.decisions.gather import inputs_of, ranks_of, speculation_of
from sglang_dsv4.decisions.hf_config import DTYPE
from sglang_dsv4.decisions.quantization import Held, fits_of
from sglang_dsv4.errors import Dsv4Error, FlagError


class Files(NamedTuple):
    """The checkpoints of a launch; `draft` is None unless the draft comes from a checkpoint of its own."""

    target: Inspection
    draft: Inspection | None


def survey_launch(arguments: Any) -> tuple[Files | None, list[Dsv4Error]]:
    """Look at flags and files; returns the files and everything that is wrong with either. No tensor is read.

    `arguments` is SGLang's ServerArgs, resolved or not, or anything with the same attributes. The files are None where
    the faults leave nothing to decide on. What no load will touch is no fault: the bundled draft without a speculative
    algorithm, the target's half of a draft's own checkpoint.
    """
    faults: list[Dsv4Error] = [*envs.environment_errors(), *_dtype_faults(arguments)]
    strict = bool(faults) or envs.STRICT.get()
    speculation = speculation_of(arguments)
    bundled = speculation.algorithm is not None and speculation.draft_path is None
    target, found = survey(arguments.model_path, draft=bundled, strict=strict, revision=arguments.revision)
    faults += found
    draft = None
    if speculation.draft_path is not None:
        revision = arguments.speculative_draft_model_revision
        draft, found = survey(speculation.draft_path, target=False, draft=True, strict=strict, revision=revision)
        faults += found
    if target is None or (draft is None and speculation.draft_path is not None):
        return None, faults
    faults += target_faults(target)
    if speculation.algorithm is not None:
        faults += draft_faults(target, draft or target)
    return Files(target, draft), faults


def decidable(faults: Iterable[Dsv4Error]) -> bool:
    """Whether a launch can be decided beside these faults: flags that cannot be read decide nothing."""
    return not any(isinstance(fault, FlagError) for fault in faults)


def _dtype_faults(arguments: Any) -> Iterator[FlagError]:
    dtype = getattr(arguments, "dtype", "auto")
    if str(dtype).removeprefix("torch.") not in ("auto", DTYPE):
        yield FlagError(
            f"--dtype {dtype}: DeepSeek-V4 is loaded as {DTYPE}",
            expected=f"auto or {DTYPE}",
            remedy="Leave it out: float16 cannot hold all of its values.",
        )


def launch_inputs(arguments: Any, files: Files, *, arch: str, flags: Flags) -> Inputs:
    """Everything that the launch's decisions rest on. `arguments` as for `survey_launch`."""
    draft = files.draft
    return inputs_of(
        files.target.checkpoint.config,
        files.target.layout,
        arch=arch,
        flags=flags,
        ranks=ranks_of(arguments),
        runner=arguments.moe_runner_backend,
        speculation=speculation_of(arguments),
        fuse_shared=arguments.enforce_shared_experts_fusion,
        draft=None if draft is None else (draft.checkpoint.config, draft.layout),
        fits=fits_of(_held(files.target), _held(draft or files.target)),
    )


def _held(inspection: Inspection) -> Held:
    return Held(inspection.view, inspection.layout, inspection.checkpoint.config)

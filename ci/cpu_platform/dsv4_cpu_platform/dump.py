"""What a test may ask for: the parameters of the reference, and the logits of every step, as files.

``DSV4_CPU_DUMP_PARAMETERS=FILE.safetensors``: the transformers state dict, float32, after the load. A NextN draft's
goes to ``FILE.draft.safetensors``.
``DSV4_CPU_DUMP_LOGITS=DIRECTORY``: one safetensors file for each request and step, with ``ids`` (int64, (S,), the whole
sequence) and ``logits`` (float32, (N, vocabulary), of its last N tokens). Only the first rank writes.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4_cpu_platform.reference import DraftReference, TargetReference

PARAMETERS_VARIABLE = "DSV4_CPU_DUMP_PARAMETERS"
LOGITS_VARIABLE = "DSV4_CPU_DUMP_LOGITS"


def first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def dump_parameters(reference: TargetReference | DraftReference) -> None:
    """Write the state dict where the environment asks for it; the file appears whole."""
    asked = os.environ.get(PARAMETERS_VARIABLE)
    if not asked or not first_rank():
        return
    target = Path(asked)
    if isinstance(reference, DraftReference):
        target = target.with_suffix(f".draft{target.suffix}")
    _save({name: tensor.contiguous() for name, tensor in reference.state_dict().items()}, target)


class LogitsDump:
    """Numbered files in one directory, or nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._written = 0

    @classmethod
    def from_environment(cls) -> "LogitsDump":
        target = os.environ.get(LOGITS_VARIABLE)
        return cls(Path(target) if target and first_rank() else None)

    def write(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        """``ids``: (S,) the whole sequence; ``logits``: (N, vocabulary) of its last N tokens."""
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        _save({"ids": ids, "logits": logits.contiguous()}, self._directory / f"{self._written:06d}.safetensors")
        self._written += 1


def _save(tensors: dict[str, torch.Tensor], target: Path) -> None:
    partial = target.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(target)

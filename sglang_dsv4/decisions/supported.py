"""Every public way to store a DeepSeek-V4, and what becomes of it: the README's table."""

from __future__ import annotations

from typing import NamedTuple

from sglang_dsv4.checkpoint.formats import Format


class Row(NamedTuple):
    """One family of checkpoints.

    experts: how its routed experts are stored; empty where that does not decide. loads: what the stream makes of it; ""
    where it is refused. rule: the code of the refusal, as `check --json` has it.
    """

    family: str
    experts: tuple[Format, ...]
    loads: str
    rule: str = ""


ROWS = (
    Row("DeepSeek's releases, 0731, DSpark, 4Expert", (Format.FP4,), "as it is, or with FP8 experts on request"),
    Row("Base releases; FP8 conversions (sgl-project, miles)", (Format.FP8,), "FP8 compressors expanded to BF16"),
    Row("AMD Quark MXFP4", (Format.QUARK_FP4,), "scale bytes relabelled, then as a release"),
    Row("NVIDIA NVFP4 (ModelOpt)", (Format.NVFP4,), "as it is; a draft in FP4 or BF16 beside it"),
    Row(
        "RedHat and canada-quant (compressed-tensors)",
        (Format.NVFP4_CT, Format.MXFP4_CT),
        "as ModelOpt's; NVFP4 shared experts expanded to BF16",
    ),
    Row("BF16 dumps; transformers' save_pretrained", (Format.BF16,), "as it is"),
    Row("transformers' stacked experts (BF16, FP8, FP4)", (), "taken apart, then as one by one"),
    Row("DeepSeek-V4.1", (), "as it is, by SGLang's own reading of its config"),
    Row("W4A16 (compressed-tensors, AutoRound, GPTQ)", (Format.W4A16, Format.GPTQ), "", "experts-format"),
    Row("W4AFP8", (Format.W4AFP8,), "", "experts-format"),
    Row("attention or shared experts in such a format", (), "", "dense-format"),
    Row("half of a fused module quantised, or its scales of two kinds", (), "", "mixed-fusion"),
    Row("DeepSeek's inference format (one file per rank)", (), "", "IndexMismatchError"),
    Row("GGUF, expert packs, .bin files", (), "", "CheckpointNotFoundError"),
)


def layouts_table_markdown() -> str:
    """The rows as a Markdown table."""
    lines = ["| checkpoint | loads | refused by |", "|---|---|---|"]
    lines += [f"| {row.family} | {row.loads} | {f'`{row.rule}`' if row.rule else ''} |" for row in ROWS]
    return "\n".join(lines)

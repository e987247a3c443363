"""`check` and `load` say the same of every layout and flag: what is OK loads, what is refused is refused alike."""

import json
import shutil
from unittest.mock import patch

import jobs
import pytest
import shards

from sglang_dsv4.checkpoint.tiny.layouts import LAYOUTS, Layout
from sglang_dsv4.decisions.moe_names import A2A, RUNNERS

FLAGS = {
    "no flag": {},
    "DEQUANT": {"SGLANG_DSV4_FP4_DEQUANT": "1"},
    "EXPERTS=0": {"SGLANG_DSV4_FP4_EXPERTS": "0"},
    "EXPERTS=1": {"SGLANG_DSV4_FP4_EXPERTS": "1"},
    "DEQUANT=on": {"SGLANG_DSV4_FP4_DEQUANT": "on"},
}
ARGUMENTS = (
    "",
    "--tp-size 2",
    "--tp-size 3",
    "--tp-size 4",
    "--tp-size 2 --ep-size 2",
    "--tp-size 2 --ep-size 2 --enforce-shared-experts-fusion",
    "--pp-size 2",
    "--pp-size 5",
    "--enforce-shared-experts-fusion",
    "--moe-runner-backend triton",
    "--moe-runner-backend deep_gemm",
    "--moe-runner-backend marlin",
    "--tp-size 2 --moe-a2a-backend deepep",
    "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1",
    "--speculative-algorithm EAGLE",
    "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1",
    "--speculative-algorithm DSPARK",
    "--speculative-algorithm NGRAM",
)
OPTIONS = (
    "--dtype bfloat16",
    "--dtype float16",
    "--ep-size 2",
    "--tp-size 0",
    "--tp-size 2 --ep-size 0",
    "--tp-size -2",
    "--pp-size 0",
    "--tp-size 2 --pp-size 2",
    "--tp-size 2 --dp-size 2 --enable-dp-attention",
    "--tp-size 2 --dp-size 2 --enable-dp-attention --enable-dp-lm-head",
    "--tp-size 2 --dp-size 3 --enable-dp-attention",
    "--dp-size 2",
    "--tp-size 2 --attn-dp-size 2",
    "--tp-size 2 --attn-cp-size 2",
    "--tp-size 2 --moe-dp-size 2",
    "--tp-size 2 --dp-size 2 --attn-dp-size 2",
    "--tp-size 2 --dcp-size 2",
    "--tp-size 2 --ep-size 2 --dcp-size 2",
)


def named(layout: Layout) -> str:
    return "-".join(word for word in (layout.names, layout.experts, layout.scales) if word)


def both(loader, model: str, arguments: list[str], flags: dict[str, str], *, draft: bool = False) -> list[str]:
    """The lines that both refuse with, after making sure that they agree."""
    said = loader.run(jobs.command, ["check", model, "--json", *arguments], flags)
    report = json.loads(said.out)
    lines = [line for refusal in report["refusals"] for line in refusal["message"].splitlines()]
    assert (said.code == 0) == report["ok"] == (not lines)
    for part in ([], ["--draft"]) if draft else ([],):
        loaded = loader.run(jobs.command, ["load", model, *part, "--", *arguments], flags)
        assert (loaded.code == 0) == report["ok"], loaded.err
        assert [line for line in lines if line not in loaded.err] == []
    return lines


# Flags meet the stored format, not the names: every flag for the native layouts, two for the others.
CROSSED = [
    pytest.param(layout, flags, id=f"{named(layout)}-{flags}")
    for layout in LAYOUTS
    for flags in FLAGS
    if layout.names == "native" or flags in ("no flag", "DEQUANT")
]


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize(("layout", "flags"), CROSSED)
def test_layouts_and_flags(loader, made, layout, flags, arguments):
    draft = layout.drafts[-1]
    model = str(made(names=layout.names, expert_format=layout.experts, scales=layout.scales, draft=draft))
    both(loader, model, arguments.split(), FLAGS[flags], draft="EAGLE" in arguments and draft != "none")


@pytest.mark.parametrize("arguments", ["--model-impl sglang", "--load-format dummy", "--load-format sharded_state"])
def test_a_load_that_is_none_of_ours_is_refused_before_it_starts(loader, made, arguments):
    said = loader.run(without_a_model, ["load", str(made()), "--tp-size", "2", "--", *arguments.split()])
    assert said.code == 1
    assert "nothing would be loaded through sglang_dsv4; found --model-impl" in said.err
    assert arguments in said.err


EXPERT, DENSE = "layers.1.ffn.experts.5.w2", "layers.2.attn.wq_a"


@pytest.mark.parametrize("flags", ["no flag", "DEQUANT=on"])
@pytest.mark.parametrize("name", [f"{EXPERT}.weight", f"{EXPERT}.scale", f"{DENSE}.weight", f"{DENSE}.scale"])
def test_half_a_pair_that_is_missing_is_told_once_by_name(loader, made, tmp_path, name, flags):
    model = shards.edited(made(draft="mtp"), tmp_path / "damaged", shards.drop(name))
    *misread, headline, missing = both(loader, str(model), [], FLAGS[flags])
    assert "found 1 kind missing. Use the config.json of this checkpoint, or download" in headline
    assert missing.startswith(f"  missing: {name} (")
    assert ["SGLANG_DSV4_FP4_DEQUANT" in line for line in misread] == [True] * (flags != "no flag")


@pytest.mark.parametrize("name", ["mtp.0.ffn.experts.5.w2.scale", "mtp.0.attn.wq_a.weight"])
def test_half_a_pair_of_a_draft_matters_to_who_loads_it(loader, made, tmp_path, name):
    model = shards.edited(made(draft="mtp"), tmp_path / "damaged", shards.drop(name))
    assert both(loader, str(model), [], {}) == []
    assert both(loader, str(model), list(jobs.NEXTN), {}, draft=True)[-1].startswith(f"  missing: {name} (")


def test_the_first_shard_alone_lacks_its_layers_and_its_head(loader, made, tmp_path):
    (folder := tmp_path / "part").mkdir()
    shutil.copy(made() / "config.json", folder)
    shutil.copy(made() / "model-00001-of-00006.safetensors", folder / "model.safetensors")
    lines = both(loader, str(folder), [], {})
    said = {line.partition(" (")[0] for line in lines}
    assert {"  missing: layers.{0..3}.attn.wq_a.weight", "  missing: head.weight"} <= said
    assert not [line for line in lines if "unexpected" in line]


def without_a_model(arguments: list[str]) -> jobs.Said:
    """The command, in a process where building a model is a failure of another kind."""
    with patch("sglang_dsv4.models.loading.rank.load_model", side_effect=AssertionError("a model was built")):
        return jobs.command(arguments, {})


@pytest.mark.parametrize("arguments", OPTIONS)
def test_other_options(loader, made, arguments):
    both(loader, str(made()), arguments.split(), {})


@pytest.mark.parametrize(
    "backend", [f"runner-backend {name}" for name in RUNNERS] + [f"a2a-backend {name}" for name in A2A]
)
@pytest.mark.parametrize("expert_format", ["fp4", "fp8"])
@pytest.mark.parametrize("flags", ["no flag", "DEQUANT"])
def test_backends(loader, made, backend, expert_format, flags):
    arguments = ["--tp-size", "2", *f"--moe-{backend}".split()]
    both(loader, str(made(expert_format=expert_format)), arguments, FLAGS[flags])


@pytest.mark.parametrize(("target", "draft"), [("fp4", "fp8"), ("fp8", "fp4")])
def test_a_draft_stored_otherwise_than_its_target(loader, made, target, draft):
    """Each is judged by its own experts; neither decides a flag for the other."""
    drafts = str(made(expert_format=draft, draft="mtp"))
    arguments = [*jobs.NEXTN, "--speculative-draft-model-path", drafts]
    assert both(loader, str(made(expert_format=target)), arguments, {}, draft=True) == []


def test_files_and_options_are_refused_together(loader, made, tmp_path):
    damaged = shards.edited(made(), tmp_path / "damaged", shards.drop("layers.1.attn.wq_a.weight"))
    lines = both(loader, str(damaged), ["--tp-size", "3"], {})
    assert any("missing: layers.1.attn.wq_a.weight" in line for line in lines)
    assert any("4 attention heads cannot be split over 3" in line for line in lines)

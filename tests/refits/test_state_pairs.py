"""What belongs together may come apart in a session, and what failed has to come again."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jobs
import pytest
import refits
import shards
from refits import Server

from sglang_dsv4.errors import IncompleteLoadError, InexactConversionError, StreamError, UnmatchedPairError, UpdateError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}

TOGETHER = {
    "wq_a and wkv": [f"layers.1.attn.{part}.{leaf}" for part in ("wq_a", "wkv") for leaf in ("weight", "scale")],
    "the compressor's halves": ["layers.1.attn.compressor.wkv.weight", "layers.1.attn.compressor.wgate.weight"],
    "the indexer's halves": [f"layers.1.attn.indexer.compressor.{part}.weight" for part in ("wkv", "wgate")],
    "gate and up": [
        f"layers.2.ffn.shared_experts.{part}.{leaf}" for part in ("w1", "w3") for leaf in ("weight", "scale")
    ],
    "an expert": [f"layers.3.ffn.experts.5.{part}.{leaf}" for part in ("w1", "w3") for leaf in ("weight", "scale")],
    "wo_a": [f"layers.1.attn.wo_a.{leaf}" for leaf in ("weight", "scale")],
}
"""What SGLang fuses, pairs or converts together, by native name."""


def arrangements(names: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every order of the names, cut into buckets in every way."""
    for order in itertools.permutations(names):
        for cuts in itertools.product((False, True), repeat=len(order) - 1):
            buckets: list[list[str]] = [[order[0]]]
            for name, cut in zip(order[1:], cuts, strict=True):
                buckets.append([name]) if cut else buckets[-1].append(name)
            yield [tuple(bucket) for bucket in buckets]


def lacking(come: set[str], names: Sequence[str]) -> set[str]:
    """Which partners are to come: of a weight its scale, of a scale its weight, where the checkpoint has one."""
    other = {"weight": "scale", "scale": "weight"}
    partners = {f"{name.rpartition('.')[0]}.{other[name.rpartition('.')[2]]}" for name in come}
    return partners.intersection(names) - come


@dataclass(frozen=True)
class Tried:
    """How many arrangements were tried, and those that left other parameters or lacked other partners."""

    count: int
    wrong: list[str]


def every_arrangement(server: Server, first: str, second: str, names: Sequence[str]) -> Tried:
    """Bring tensors of the second checkpoint into a model of the first in every way; put them back in between."""
    from sglang_dsv4.models.loading.rank import digests

    old, new = (dict(jobs.tensors_of(model, names)) for model in (first, second))
    ways = list(arrangements(names))
    if len(ways) > 60:
        ways = [*ways[:8], *random.Random(0).sample(ways[8:], 52)]
    wrong = []
    with ExitStack() as stack:
        (model,) = refits.models_of(server, stack)
        start = digests(model)
        state = model.loader_state
        model.load_weights(list(new.items()))
        wanted = digests(model)
        if wanted == start:
            wrong.append("nothing changed")
        for way in ways:
            model.load_weights(list(old.items()))
            if digests(model) != start:
                wrong.append(f"{way}: not put back")
            session, come = state.begin(), set()
            for bucket in way:
                refits.give([(name, new[name]) for name in bucket], [model], stream=False)
                come |= set(bucket)
                if set(session.missing()) != lacking(come, names):
                    wrong.append(f"{way} after {sorted(come)}: {session.missing()}")
            state.end()
            if digests(model) != wanted:
                wrong.append(f"{way}: other parameters")
    return Tried(len(ways), wrong)


LAUNCHES = {
    "fp4": ("loader", {}, ()),
    "dequant": ("loader", DEQUANT, ()),
    "fused": ("loader", {}, jobs.FUSED),
    "dequant-fused": ("loader", DEQUANT, jobs.FUSED),
    "wo_a-fp8": ("keeping_loader", {}, ()),
}


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("together", TOGETHER)
def test_what_belongs_together_may_come_apart(request, made, launch, together):
    process, flags, arguments = LAUNCHES[launch]
    first, second = (str(made(seed=seed)) for seed in (0, 1))
    running = request.getfixturevalue(process)
    names = TOGETHER[together]
    done = running.run(every_arrangement, Server(first, arguments=arguments, flags=flags), first, second, names)
    assert done.wrong == []
    assert done.count == (60 if len(names) == 4 else 4)


def test_in_one_bucket_they_are_a_fresh_load(loader, made, tmp_path):
    """What the arrangements above are compared with."""
    names = [name for names in TOGETHER.values() for name in names]
    brought = shards.tensors(made(seed=1))

    def change(files: shards.Shards) -> None:
        for name in names:
            shards.of(files, name)[name] = brought[name]

    mixed = shards.edited(made(), tmp_path / "mixed", change)
    for flags in ({}, DEQUANT):
        wanted = loader.load(mixed, flags=flags).digests
        load = jobs.Load(str(made()), flags=flags)
        assert loader.run(jobs.updated, load, [jobs.Update(str(made(seed=1)), tuple(names))]).digests == wanted


# --- NVFP4, as far as a CPU can ---------------------------------------------------------------------------------------


@contextmanager
def as_on_a_gpu(marlin: bool) -> Iterator[None]:
    """A launch that needs a GPU, up to what needs it: a fake of the decision and of the post-processing."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from sglang_dsv4.decisions.decide import Decision
    from sglang_dsv4.models.loading import plan

    with (
        patch.object(Decision, "raise_if_refused", lambda self: None),
        patch.object(DefaultModelLoader, "postprocess_weights", staticmethod(lambda model, target_device: None)),
        patch.object(plan, "_runs_marlin", lambda: marlin),
    ):
        yield


def scalar_scales(model: str, leaf: str, marlin: bool) -> dict[str, Any]:
    """What a session says of w1's and w3's scales of one leaf, alone and differing."""
    w1, w3 = (f"layers.1.ffn.experts.2.{part}" for part in ("w1", "w3"))
    tensors = dict(jobs.tensors_of(model, ()))
    names = [name for name in tensors if name.startswith((f"{w1}.", f"{w3}.")) and not name.endswith("input_scale")]
    rest = [name for name in names if not name.endswith(f".{leaf}")]
    found: dict[str, Any] = {}
    arguments = ("--moe-runner-backend", "marlin")
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu(marlin))
        (loaded,) = refits.models_of(Server(model, arguments=arguments), stack)
        state = loaded.loader_state
        value = tensors[f"{w1}.{leaf}"]
        session = state.begin()
        loaded.load_weights([(f"{w1}.{leaf}", value.clone())])
        found["w1 alone"] = session.missing()
        loaded.load_weights([(f"{w1}.{leaf}", value.clone())])
        if leaf != "input_scale":
            loaded.load_weights([(name, tensors[name].clone()) for name in rest])
            found["without w3's"] = session.missing()
        try:
            loaded.load_weights([(f"{w3}.{leaf}", value.clone() * 2)])
            found["differing"] = "accepted"
        except StreamError as error:
            found["differing"] = str(error)
        found["after it"] = session.missing()
        alike = {f"{part}.{leaf}": value for part in (w1, w3)} | {name: tensors[name] for name in rest}
        loaded.load_weights([(name, tensor.clone()) for name, tensor in alike.items()])
        found["repaired"] = session.missing()
        state.end()
    return found


def test_w1s_and_w3s_input_scale_belong_together(loader, made):
    found = loader.run(scalar_scales, str(made(expert_format="nvfp4")), "input_scale", False)
    other = "layers.1.ffn.experts.2.w3.input_scale"
    assert found["w1 alone"] == [other]
    assert "w1 and w3 differ in input_scale" in found["differing"]  # though w1's came twice before
    assert other in found["after it"]
    assert found["repaired"] == []


def share_tensor_scales(files: shards.Shards) -> None:
    """As Marlin wants it: w3's scale of the tensor is w1's."""
    for shard in files.values():
        for name in [name for name in shard if name.endswith("w3.weight_scale_2")]:
            shard[name] = shard[name.replace(".w3.", ".w1.")]


@pytest.mark.parametrize("marlin", [True, False])
def test_under_marlin_so_do_their_tensor_scales(loader, made, tmp_path, marlin):
    alike = shards.edited(made(expert_format="nvfp4"), tmp_path / "alike", share_tensor_scales)
    found = loader.run(scalar_scales, str(alike), "weight_scale_2", marlin)
    assert "layers.1.ffn.experts.2.w1.weight" in found["w1 alone"]
    assert ("layers.1.ffn.experts.2.w3.weight_scale_2" in found["w1 alone"]) == marlin
    assert found["without w3's"] == ["layers.1.ffn.experts.2.w3.weight_scale_2"]
    assert ("w1 and w3 differ in weight_scale_2" in found["differing"]) == marlin
    assert found["repaired"] == []


# --- buckets that are refused or fail ---------------------------------------------------------------------------------

EXPERT, WO_A = "layers.1.ffn.experts.2.w1", "layers.1.attn.wo_a"


@dataclass(frozen=True)
class Step:
    """A bucket of a session, and the error that it ends in: its class, and what its text matches."""

    bucket: tuple[tuple[str, str], ...]
    error: type[Exception] | None = None
    text: str = ""
    missing: tuple[str, ...] = ()


def steps_of(load: jobs.Load, second: str, steps: Sequence[Step]) -> tuple[list[str], dict[str, str], list[str]]:
    """Run a session: what went otherwise than said, the digests after its end, and the lines of that.

    A tensor of a bucket is (name, how): "new", "old", or one of `DAMAGED`.
    """
    from sglang_dsv4.models.loading.rank import digests

    values = {"new": dict(jobs.tensors_of(second, ())), "old": dict(jobs.tensors_of(load.model, ()))}
    wrong = []
    with jobs.loaded(load) as model:
        session = model.loader_state.begin()
        for number, step in enumerate(steps):
            before = digests(model)
            bucket = [
                (name, DAMAGED[how](values["new"][name]) if how in DAMAGED else values[how][name].clone())
                for name, how in step.bucket
            ]
            try:
                model.load_weights(bucket)
                raised = None
            except Exception as error:
                raised = error
            if not (type(raised) is step.error or raised is step.error) or not re.search(step.text, str(raised)):
                wrong.append(f"step {number}: {raised!r}")
            if isinstance(raised, UpdateError) and digests(model) != before:
                wrong.append(f"step {number}: refused, and written")
            if sorted(step.missing) != session.missing():
                wrong.append(f"step {number}: missing {session.missing()}")
        lines = model.loader_state.end()
        return wrong, digests(model), lines


def _inexact(tensor: Any) -> Any:
    """Of a whole block, one scale far below the others: no single power of two holds it."""
    import torch

    codes = tensor.view(torch.uint8).clone()
    codes[0, 0] = 10
    return codes.view(torch.float8_e8m0fnu)


def _nan(tensor: Any) -> Any:
    import torch

    codes = tensor.view(torch.uint8).clone()
    codes[0, 0] = 255
    return codes.view(torch.float8_e8m0fnu)


def _third(tensor: Any) -> Any:
    return tensor.float() / 3


def _bf16(tensor: Any) -> Any:
    import torch

    return tensor.float().to(torch.bfloat16)


DAMAGED = {"inexact": _inexact, "nan": _nan, "third": _third, "bf16": _bf16, "flat": lambda tensor: tensor.reshape(-1)}

NEW_EXPERT = tuple((f"{EXPERT}.{leaf}", "new") for leaf in ("weight", "scale"))
NEW_WO_A = tuple((f"{WO_A}.{leaf}", "new") for leaf in ("weight", "scale"))
NORM = ("norm.weight", "new")

SESSIONS = {
    "a pair that cannot be converted has to come again, and what came beside it": [
        Step(
            (NORM, (f"{EXPERT}.weight", "new"), (f"{EXPERT}.scale", "inexact")),
            None,
            "",
            ("norm.weight", f"{EXPERT}.weight", f"{EXPERT}.scale"),
        ),
        Step(NEW_EXPERT, missing=("norm.weight",)),
        Step((NORM,)),
    ],
    "a half that is sent again replaces the one that waits": [
        Step(((f"{EXPERT}.weight", "old"),), missing=(f"{EXPERT}.scale",)),
        Step((NEW_EXPERT[0],), missing=(f"{EXPERT}.scale",)),
        Step((NEW_EXPERT[1], NORM)),
    ],
    "a bucket is refused as a whole": [
        Step((NORM, ("head.weight", "flat")), UpdateError, r"head\.weight: found shape \[131072\]"),
        Step((NORM, (f"{EXPERT}.scale", "nan")), UpdateError, rf"{EXPERT}\.scale: block scale \(0, 0\)"),
        Step((NORM, (f"{EXPERT}.scale", "third")), UpdateError, r"cannot hold block scale"),
        Step((NORM, NORM), UpdateError, r"twice: norm\.weight"),
        Step((NORM, *NEW_EXPERT)),
    ],
}


@pytest.mark.parametrize("flags", [{}, DEQUANT], ids=["fp4", "dequant"])
@pytest.mark.parametrize("session", SESSIONS)
def test_what_failed_has_to_come_again(loader, made, session, flags):
    steps = list(SESSIONS[session])
    for number, step in enumerate(steps):
        if any(how == "inexact" for _, how in step.bucket):
            failed = replace(step, error=InexactConversionError, text=f"{EXPERT}.weight: FP4 -> FP8 would round")
            steps[number] = failed if flags else replace(step, missing=())  # packed FP4 takes any scale
            if not flags:
                steps[number + 1 :] = [replace(later, missing=()) for later in steps[number + 1 :]]
    load = jobs.Load(str(made()), flags=flags)
    wrong, digests, lines = loader.run(steps_of, load, str(made(seed=1)), steps)
    assert wrong == []
    names = ("norm.weight", *(name for name, _ in NEW_EXPERT))
    assert digests == loader.run(jobs.updated, load, [jobs.Update(str(made(seed=1)), names)]).digests
    assert not [line for line in lines if line.startswith("never written")]


UNQUANTISED = {
    "the scale first": [Step((NEW_WO_A[1],), missing=(f"{WO_A}.weight",)), Step(((f"{WO_A}.weight", "bf16"),))],
    "the scale last": [Step(((f"{WO_A}.weight", "bf16"),)), Step((NEW_WO_A[1],))],
    "in one bucket": [Step(((f"{WO_A}.weight", "bf16"), NEW_WO_A[1]))],
}


@pytest.mark.parametrize("order", UNQUANTISED)
def test_a_scale_beside_a_weight_that_came_unquantised_is_left_out(loader, made, order):
    load, second = jobs.Load(str(made())), str(made(seed=1))
    alone = loader.run(steps_of, load, second, [Step(((f"{WO_A}.weight", "bf16"),))])
    wrong, digests, _ = loader.run(steps_of, load, second, UNQUANTISED[order])
    assert (wrong, digests) == ([], alone[1])
    # a weight that comes quantised after that waits for a scale of its own
    more = [*UNQUANTISED[order], Step((NEW_WO_A[0],), missing=(f"{WO_A}.scale",)), Step((NEW_WO_A[1],))]
    wrong, digests, _ = loader.run(steps_of, load, second, more)
    names = tuple(name for name, _ in NEW_WO_A)
    assert (wrong, digests) == ([], loader.run(jobs.updated, load, [jobs.Update(second, names)]).digests)


def test_what_waits_is_bounded_and_what_would_exceed_it_is_refused_before_a_write(loader, made):
    """w1 of one expert has 32768 bytes packed, w2 as many; scales have 2048."""
    room = {"SGLANG_DSV4_PLUGIN_WAITING_BYTES": "40000", **DEQUANT}
    load = jobs.Load(str(made()), flags=room)
    other = EXPERT.replace("w1", "w2")
    assert other != EXPERT
    refused = (UpdateError, "SGLANG_DSV4_PLUGIN_WAITING_BYTES")
    steps = [
        Step((NORM, NEW_EXPERT[0], (f"{other}.weight", "new")), *refused),
        Step((NEW_EXPERT[0],), missing=(f"{EXPERT}.scale",)),
        Step((NEW_EXPERT[0],), missing=(f"{EXPERT}.scale",)),  # in place of the one that waits
        Step((NORM, (f"{other}.weight", "new")), *refused, (f"{EXPERT}.scale",)),
        Step(((f"{other}.weight", "new"), NEW_EXPERT[1]), missing=(f"{other}.scale",)),  # one goes as the other comes
        Step(((f"{other}.scale", "new"), NORM)),
    ]
    wrong, digests, _ = loader.run(steps_of, load, str(made(seed=1)), steps)
    assert wrong == []
    names = ("norm.weight", *(f"{module}.{leaf}" for module in (EXPERT, other) for leaf in ("weight", "scale")))
    assert digests == loader.run(jobs.updated, load, [jobs.Update(str(made(seed=1)), names)]).digests


WHOLE = {"SGLANG_DSV4_PLUGIN_WHOLE_UPDATES": "1"}


def ends(load: jobs.Load, second: str) -> list[Any]:
    """What the ends of a session say that brings all but one tensor, then that one; whether it was open between."""
    brought = dict(jobs.tensors_of(second, ()))
    last = brought.pop("norm.weight")
    found: list[Any] = []
    with jobs.loaded(load) as model:
        state = model.loader_state
        state.begin()
        model.load_weights(list(brought.items()))
        try:
            state.end()
        except IncompleteLoadError as error:
            found += [list(error.details), state.session is not None]
        model.load_weights([("norm.weight", last)])
        return [*found, state.end()[0]]


def test_a_session_can_be_asked_for_the_whole_model(loader, made):
    load, second = jobs.Load(str(made()), flags=WHOLE), str(made(seed=1))
    found = loader.run(ends, load, second)
    count = len(shards.tensors(made()))
    said = f"DeepseekV4ForCausalLM: {count} tensors came, 139 of 139 parameters written"
    assert found == [["model.norm.weight"], True, said]
    with pytest.raises(IncompleteLoadError, match="the update does not write the whole model"):
        loader.run(jobs.updated, load, [jobs.Update(second, ("norm.weight",))])


def test_an_unknown_name_is_said_before_a_missing_half(loader, made):
    load = jobs.Load(str(made()))
    with pytest.raises(UpdateError, match=r"unexpected: norm\.wait"):
        loader.run(unpaired, load, "norm.wait")


def unpaired(load: jobs.Load, name: str) -> None:
    import torch

    (half,) = jobs.tensors_of(load.model, (f"{WO_A}.weight",))
    with jobs.loaded(load) as model:
        model.load_weights([half, (name, torch.ones(1))])


def negative_mix(load: jobs.Load, name: str, native: str) -> bool:
    """Send a hyper-connection's scale, all negative; whether its parameter holds it then."""
    import torch

    ((_, tensor),) = jobs.tensors_of(load.model, (native,))
    with jobs.loaded(load) as model:
        model.load_weights([(name, -tensor.abs())])
        return bool(torch.equal(dict(model.named_parameters())[f"model.{native}"].cpu(), -tensor.abs()))


def test_the_scale_of_a_hyper_connection_may_be_negative(loader, made):
    """Transformers names it as the scale of a block is named."""
    load = jobs.Load(str(made()))
    assert loader.run(negative_mix, load, "model.layers.1.attn_hc.scale", "layers.1.hc_attn_scale")


@pytest.mark.parametrize("half", ["weight", "scale"])
def test_a_stack_waits_for_its_scales_in_a_session_too(loader, made, tmp_path, half):
    import layouts

    stacked = tmp_path / "stacked"
    shards.edited(made(names="hf", expert_format="fp8", scales="float32"), stacked, layouts.stack_experts)
    found = loader.run(half_a_stack, jobs.Load(str(stacked)), half)
    other = "layers.1.ffn.experts.down_proj" + ("_scale" if half == "weight" else "")
    assert found == [[other], [], "ended"]


def half_a_stack(load: jobs.Load, half: str) -> list[Any]:
    """What is missing after half of a stack, and after the other; whether the end came."""
    weight = "model.layers.1.mlp.experts.down_proj"
    halves = [weight, f"{weight}_scale_inv"]
    found: list[Any] = []
    with jobs.loaded(load) as model:
        session = model.loader_state.begin()
        for name in halves if half == "weight" else reversed(halves):
            model.load_weights(jobs.tensors_of(load.model, (name,)))
            found.append(session.missing())
            if len(found) == 1:
                try:
                    model.loader_state.end()
                except UnmatchedPairError:
                    continue
                return [*found, "ended too early"]
        model.loader_state.end()
        return [*found, "ended"]

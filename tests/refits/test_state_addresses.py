"""Updates write into the memory that is there, open no file, and know the model that was served."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import layouts
import numpy as np
import pytest
import refits
import shards
from processes import process
from refits import Refit, Server

from sglang_dsv4.errors import UpdateError

DEQUANT = {"SGLANG_DSV4_FP4_DEQUANT": "1"}
PROCESSES = pytest.mark.parametrize("process", ["loader", "keeping_loader"], ids=["wo_a-bf16", "wo_a-fp8"])


def server(model: Path, draft: str = "mtp", flags: dict[str, str] | None = None, *arguments: str) -> Server:
    """A server of this checkpoint with a draft of its kind."""
    return Server(str(model), bool(draft), (*(jobs.NEXTN if draft == "mtp" else ()), *arguments), flags or {})


# --- a launch with dummy weights --------------------------------------------------------------------------------------


def filled(wanted: Server, some: Refit, everything: Refit) -> list[tuple[refits.Refitted, refits.Refitted]]:
    """A few tensors, then all, into models that the launch filled with dummy numbers."""
    refits.hold(wanted)
    try:
        return list(zip(refits.refit(some), refits.refit(everything), strict=True))
    finally:
        refits.release()


@PROCESSES
@pytest.mark.parametrize("draft", ["mtp", "dspark"])
@pytest.mark.parametrize(
    ("experts", "flags"), [("fp4", {}), ("fp4", DEQUANT), ("fp8", {})], ids=["fp4", "dequant", "fp8"]
)
def test_dummy_weights_then_updates_are_a_load_from_disk(request, made, process, flags, draft, experts):
    running = request.getfixturevalue(process)
    launch = server(made(draft=draft, expert_format=experts), draft, flags)
    dummy = replace(launch, arguments=(*launch.arguments, "--load-format", "dummy"))
    some = Refit(launch.model, buckets=3, names=("norm.weight", "mtp.0.attn.wo_a.scale", "mtp.0.attn.wo_a.weight"))
    everything = Refit(launch.model, buckets=9, seed=1, removed=4)
    expected = running.run(refits.fresh, launch)
    for (first, last), digests in zip(running.run(filled, dummy, some, everything), expected, strict=True):
        assert first.digests != digests
        assert [line for line in first.said if line.startswith("never written")]
        assert last.digests == digests
        assert not [line for line in last.said if line.startswith("never written")]
        assert first.moved == last.moved == []


# --- the checkpoint is gone -------------------------------------------------------------------------------------------


_opened: list[str] = []
_watching = False


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event in ("open", "os.listdir", "os.scandir", "os.stat", "socket.connect"):
        _opened.append(f"{event} {arguments[0]}")


@contextmanager
def watching_files() -> Iterator[list[str]]:
    """What Python opens, lists or connects to in the block. (An audit hook stays for the life of its process.)"""
    global _watching
    if "files" not in _hooked:
        sys.addaudithook(_note)
        _hooked.append("files")
    _opened.clear()
    _watching = True
    try:
        yield _opened
    finally:
        _watching = False


_hooked: list[str] = []


def without_its_folder(wanted: Server, first: Refit, second: Refit) -> tuple[list[refits.Refitted], list[str]]:
    """Refits of a server whose checkpoint is moved away once it is loaded; what they opened."""
    refits.hold(wanted)
    try:
        shutil.rmtree(wanted.model)
        refits.refit(first)  # imports what it needs
        brought = {name: dict(jobs.tensors_of(second.model, ()))[name] for name in second.names}
        with patch.object(jobs, "tensors_of", lambda model, names: list(brought.items())), watching_files() as opened:
            done = refits.refit(second)
            return done, list(opened)
    finally:
        refits.release()


SOME = (
    "norm.weight",
    *(f"layers.1.attn.wo_a.{leaf}" for leaf in ("weight", "scale")),
    *(f"layers.2.ffn.experts.3.w1.{leaf}" for leaf in ("weight", "scale")),
    *(f"mtp.0.attn.wo_a.{leaf}" for leaf in ("weight", "scale")),
    "mtp.0.hnorm.weight",
)


@PROCESSES
def test_an_update_opens_no_file_and_needs_no_folder(request, made, tmp_path, process):
    running = request.getfixturevalue(process)
    other = made(draft="mtp", seed=1)
    copy = shutil.copytree(made(draft="mtp"), tmp_path / "copy")
    all_of_it = Refit(str(other), buckets=4)
    done, opened = running.run(
        without_its_folder, server(copy, "mtp", DEQUANT), all_of_it, Refit(str(other), 3, 0, names=SOME)
    )
    assert opened == []
    for part, digests in zip(done, running.run(refits.fresh, server(other, "mtp", DEQUANT)), strict=True):
        assert part.digests == digests


def test_what_opens_files_is_seen(tmp_path):
    """Of the test above."""
    with watching_files() as opened:
        (tmp_path / "x").write_text("")
    assert [line for line in opened if line.endswith("/x")]


def hub_cache(root: Path, **revisions: Path) -> str:
    """A cache of the hub with a repository of some revisions, each a checkpoint; returns its id."""
    repository = root / "models--someone--V4-Tiny"
    (repository / "refs").mkdir(parents=True)
    for name, folder in revisions.items():
        commit = f"{len(list((repository / 'refs').iterdir())):x}" * 40
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
    return "someone/V4-Tiny"


def update_of_hub(wanted: Server, good: str, bad: str) -> tuple[dict[str, str], str]:
    """Digests after an update that fits what is served, and the refusal of one that fits another revision."""
    from sglang_dsv4.models.loading.rank import digests

    with ExitStack() as stack:
        (model,) = refits.models_of(wanted, stack)
        model.load_weights(jobs.tensors_of(good, ()))
        try:
            model.load_weights(jobs.tensors_of(bad, ()))
        except UpdateError as error:
            return digests(model), str(error)
        return digests(model), "accepted"


def test_an_update_is_judged_by_the_revision_that_is_served(loader, made, tmp_path, monkeypatch):
    """The repository's main has a vocabulary of another size."""
    main = tmp_path / "main"
    shards.edited(made(), main, lambda files: None)
    layouts.configured(main, vocab_size=256)
    small = shards.read(main)
    for name in ("embed.weight", "head.weight", "layers.0.ffn.gate.tid2eid"):
        shard = shards.of(small, name)
        shape = (256, *shard[name].shape[1:])
        data = shard[name].data[: len(shard[name].data) // 2]
        shard[name] = replace(shard[name], shape=shape, data=data)
    for name, shard in small.items():
        shards.write_shard(main / name, shard)
    hub = hub_cache(tmp_path / "hub", main=main, tuned=made())
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))  # which is read at import
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with process() as running:
        served = Server(hub, arguments=("--revision", "tuned"))
        found, refusal = running.run(update_of_hub, served, str(made(seed=1)), str(main))
    assert found == loader.run(refits.fresh, Server(str(made(seed=1))))[0]
    assert "embed.weight: found shape [256, 256], expected [512, 256]" in refusal


# --- drafts with a repository of their own ----------------------------------------------------------------------------


def of_its_own(folder: Path, source: Path) -> Path:
    """The draft of a checkpoint as a repository of its own."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", shards.INDEX))
    files = shards.read(source)
    layouts.only_draft(files)
    for number, shard in enumerate(files.values()):
        shards.write_shard(folder / f"draft-{number}.safetensors", shard)
    return folder


@pytest.mark.parametrize("draft", ["mtp", "dspark"])
def test_each_model_takes_its_own_of_two_repositories(loader, made, tmp_path, draft):
    alone = [of_its_own(tmp_path / f"draft{seed}", made(draft=draft, seed=seed)) for seed in (0, 1)]
    own = ("--speculative-draft-model-path", str(alone[0]))
    own += ("--speculative-num-draft-tokens", "2") if draft == "mtp" else ()
    served = server(made(), draft, {}, *own)
    everything = str(made(draft=draft, seed=1))
    loader.run(refits.hold, served)
    try:
        both = loader.run(refits.refit, Refit(everything, buckets=7, removed=5))
        drafts = loader.run(refits.refit, Refit(str(alone[1]), buckets=2))
    finally:
        loader.run(refits.release)
    expected = loader.run(refits.fresh, server(Path(everything), draft))
    assert [part.digests for part in both] == [part.digests for part in drafts] == expected
    of_draft = len(shards.tensors(alone[1]))
    total = len(shards.tensors(Path(everything)))
    skipped = "belongs to another model of this server"
    assert f"skipped {of_draft} tensors: {skipped}" in both[0].said
    assert f"skipped {total - of_draft} tensors: {skipped}" in both[1].said
    assert f"skipped {of_draft} tensors: {skipped}" in drafts[0].said


# --- ROCm: the weight of a wo_a is made anew as well ------------------------------------------------------------------


@dataclass(frozen=True)
class OnRocm:
    """Digests of a model in which `wo_a` is as ROCm's kernel reads it: loaded, and after each update; what moved."""

    digests: list[dict[str, str]]
    moved: list[str]


@contextmanager
def fake_rocm() -> Iterator[None]:
    """A fake device: SGLang's own function for ROCm, which needs none, where SGLang would call it on one."""
    from sglang.srt.models import deepseek_v4
    from sglang.srt.models.deepseek_common.amd.deepseek_v4_wo_a_fp8 import wo_a_weight_scale_to_e8m0

    if deepseek_v4._wo_a_weight_scale_to_e8m0 is not None:
        raise RuntimeError("this is ROCm")
    with patch.object(deepseek_v4, "_wo_a_weight_scale_to_e8m0", wo_a_weight_scale_to_e8m0):
        yield


def on_rocm(wanted: Server, which: int, updates: list[tuple[str, tuple[str, ...]]]) -> OnRocm:
    """One model of a server, then updates (checkpoint, names) one after the other."""
    from sglang_dsv4.models.loading.rank import digests

    with fake_rocm(), ExitStack() as stack:
        model = refits.models_of(wanted, stack)[which]
        found, before = [digests(model)], refits.addresses(model)
        for checkpoint, names in updates:
            model.load_weights(jobs.tensors_of(checkpoint, names))
            found.append(digests(model))
        after = refits.addresses(model)
        return OnRocm(found, [name for name in before if after[name] != before[name]])


def uneven(seed: int):
    """Give every scale of a `wo_a` a value that is no power of two."""

    def change(files: shards.Shards) -> None:
        rng = np.random.default_rng(seed)
        for shard in files.values():
            for name in [name for name in shard if name.endswith("wo_a.scale")]:
                values = np.frombuffer(shard[name].data, np.float32)
                uneven = (values * rng.uniform(1.1, 1.9, values.shape)).astype(np.float32)
                shard[name] = replace(shard[name], data=uneven.tobytes())

    return change


@pytest.mark.parametrize(("which", "root", "path"), [(0, "layers.1", "model.layers.1"), (1, "mtp.0", "model.decoder")])
def test_on_rocm_a_wo_a_changes_with_its_update_alone(keeping_loader, made, tmp_path, which, root, path):
    options = {"draft": "mtp", "expert_format": "fp8", "scales": "float32"}
    first, second = (shards.edited(made(seed=seed, **options), tmp_path / str(seed), uneven(seed)) for seed in (0, 1))
    wo_a = tuple(f"{root}.attn.wo_a.{leaf}" for leaf in ("weight", "scale"))
    brought = shards.tensors(second)

    def change(files: shards.Shards) -> None:
        for name in wo_a:
            shards.of(files, name)[name] = brought[name]

    mixed = shards.edited(first, tmp_path / "mixed", change)
    norm = "norm.weight" if which == 0 else "mtp.0.hnorm.weight"
    updates = [
        (str(first), (norm,)),
        (str(second), wo_a),
        (str(second), wo_a),
        (str(first), (norm,)),
        (str(first), wo_a),
    ]
    done = keeping_loader.run(on_rocm, server(first), which, updates)
    start, after_norm, once, twice, after_norm_again, back = done.digests
    replaced = keeping_loader.run(on_rocm, server(mixed), which, []).digests[0]
    assert start == after_norm == back
    assert replaced == once == twice == after_norm_again
    ours = {f"{path}.self_attn.wo_a.weight", f"{path}.self_attn.wo_a.weight_scale_inv"}
    assert {name for name in start if start[name] != replaced[name]} == ours
    assert done.moved == []
    plain = keeping_loader.run(refits.fresh, server(first))[which]
    assert {name for name in start if start[name] != plain[name]} >= ours  # the fake device made something of its own

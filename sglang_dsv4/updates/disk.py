"""A checkpoint that an update reads: judged by its headers, its scales looked at, then read by our own readers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.config import SIZES, ModelConfigFacts
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import CONFIG_FILE, Checkpoint
from sglang_dsv4.checkpoint.names import collapse, counted
from sglang_dsv4.checkpoint.storage import LocalStorage
from sglang_dsv4.errors import Dsv4Error, IncompleteLoadError, UpdateError, together
from sglang_dsv4.models.loading.agreement import in_file_order, seen
from sglang_dsv4.models.loading.known import WITHOUT_LOAD_WEIGHTS
from sglang_dsv4.models.loading.readers import LocalReader
from sglang_dsv4.models.loading.session import Entry, of_another
from sglang_dsv4.stream.audit import SCALES
from sglang_dsv4.updates.request import Runner

if TYPE_CHECKING:
    from sglang_dsv4.stream import Named

FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", *WITHOUT_LOAD_WEIGHTS)
"""Values of load_format that an update from disk takes. A call that names none brings the one of the launch. We read
safetensors files ourselves whichever it is; SGLang takes disk updates with the first of them alone."""

AUTO = "auto"

WITHOUT_MEANING = frozenset(
    (
        *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout", "auto_map"),
        *("num_nextn_predict_layers", "num_mtp_layers", "expert_dtype", "quantization_config", "output_hidden_states"),
        *("max_position_embeddings", "attention_bias", "ep_size", "pretraining_tp", "return_dict"),
    )
)  # fmt: skip
"""Keys of config.json in which two folders of one model may differ."""


class AgainError(Exception):
    """SGLang asks for the weights a second time, to roll back: it would read the new folder once more."""


@dataclass
class Part:
    """What one model takes of a folder. listed: the tensors that this rank reads. native: name in the file -> native.
    handed: whether its stream was given out."""

    listed: list[TensorInfo]
    native: dict[str, str]
    handed: bool = False


@dataclass
class Folder:
    """A checkpoint that was judged. digest: of what the ranks have to see alike. parts: what each model takes."""

    checkpoint: Checkpoint
    digest: str
    parts: list[tuple[Runner, Part]] = field(default_factory=list)

    def part_of(self, runner: Runner) -> Part:
        """What a model takes."""
        return next(part for owner, part in self.parts if owner is runner)

    def stream(self, runner: Runner) -> Iterator[Named]:
        """The tensors of a model by native name, once; then AgainError."""
        part = self.part_of(runner)
        if part.handed:
            raise AgainError
        part.handed = True
        if runner.state.session is not None:
            runner.state.session.lifetime = reader_of(self.checkpoint).lifetime
            runner.state.session.lift_bound()
        return self._tensors(part)

    def _tensors(self, part: Part) -> Iterator[Named]:
        yield from read(self.checkpoint, part.listed, part.native)
        self.checkpoint.storage.require_unchanged(sorted({info.shard for info in part.listed}))


def require_known_format(load_format: str | None) -> None:
    """UpdateError for a load_format that an update from disk does not take."""
    if load_format is not None and load_format not in FORMATS:
        raise UpdateError(
            f"load_format {load_format!r} is none that an update from disk takes",
            expected=", ".join(FORMATS[: -len(WITHOUT_LOAD_WEIGHTS)]),
            remedy="Leave load_format out, or name auto: safetensors files are read whatever it is.",
        )


def judged(runners: list[Runner], path: str) -> Folder:
    """Open a folder and judge all that it brings: config.json, names, shapes, dtypes, pairs, and the values of scales.

    Raises what reading a checkpoint raises, and UpdateError and its kin for what does not fit the models that are
    served. Nothing is written.
    """
    checkpoint = Checkpoint.open(path)
    if not isinstance(checkpoint.storage, LocalStorage):
        raise UpdateError(
            f"{path}: an update reads from a folder",
            found="object storage",
            expected="a folder that every rank sees",
            remedy="Copy the checkpoint to a folder and name that.",
        )
    infos = in_file_order(checkpoint.tensors.values())
    dialect = checkpoint.dialect
    native = {info.name: dialect.to_native(info.name) if dialect.knows(info.name) else info.name for info in infos}
    folder = Folder(checkpoint, _digest(checkpoint))
    faults: list[Dsv4Error] = []
    for runner in runners:
        kind = runner.state.wiring.kind
        own = [info for info in infos if not of_another(native[info.name], kind)]
        share = runner.state.plan().share
        listed = [info for info in own if share.reason_to_skip(native[info.name]) is None]
        folder.parts.append((runner, Part(listed, native)))
        runner.sent = {native[info.name] for info in own}
        if own:
            faults += _faults(runner, folder, own, native)
    if faults:
        raise together(faults)
    if not any(runner.sent for runner in runners):
        raise UpdateError(
            f"{path} brings nothing for any model of this server",
            found=f"{counted(len(infos), 'tensor')} of a draft",
            expected="tensors of a model that is served",
            remedy="Name the folder of the target, or start the server with that draft.",
        )
    return folder


def _faults(runner: Runner, folder: Folder, own: list[TensorInfo], native: dict[str, str]) -> Iterator[Dsv4Error]:
    session = runner.state.session
    if session is None:
        return
    entries = [Entry(native[info.name], info.dtype, info.shape) for info in own]
    scales = [info for info in folder.part_of(runner).listed if native[info.name].rpartition(".")[2] in SCALES]
    steps = (
        lambda: _require_same_model(folder.checkpoint, runner),
        lambda: session.require_fitting(entries, read(folder.checkpoint, scales, native)),
        lambda: session.require_pairs(entries),
        lambda: _require_whole(runner),
    )
    for step in steps:
        try:
            step()
        except Dsv4Error as error:
            yield error


def reader_of(checkpoint: Checkpoint) -> LocalReader:
    """A reader of a local checkpoint, as the launch's options of reading have it."""
    from sglang.srt.runtime_context import get_model

    options = get_model()
    return LocalReader(
        checkpoint.storage.uri,
        mapped=not options.weight_loader_disable_mmap,
        read_ahead=options.weight_loader_prefetch_checkpoints,
        drop_cache=options.weight_loader_drop_cache_after_load,
    )


def read(checkpoint: Checkpoint, listed: list[TensorInfo], native: dict[str, str]) -> Iterator[Named]:
    """Tensors of a local checkpoint by native name."""
    for name, tensor in reader_of(checkpoint).read(listed, shared=False, confirm=lambda _: None):
        yield native[name], tensor


def _require_same_model(checkpoint: Checkpoint, runner: Runner) -> None:
    """UpdateError where config.json describes another model than the one that is served."""
    differing = list(differences(checkpoint.config, runner.state.known.facts.config))
    if differing:
        raise UpdateError(
            f"{checkpoint.storage.locate(CONFIG_FILE)} describes another model than the {runner.role} that is served",
            found=differing[0],
            expected="the config.json of the same model: an update brings weights, and no other arithmetic",
            remedy="Write the checkpoint with the config.json that the server was started from, or restart it.",
            details=differing[1:],
        )


def differences(new: ModelConfigFacts, served: ModelConfigFacts) -> Iterator[str]:
    """What two configs say differently, whichever way each is spelled; keys that only one has are left out."""
    for what in ("family", "ratios", "hash_layers", "rope", "tie_word_embeddings"):
        mine, theirs = getattr(new, what), getattr(served, what)
        if mine != theirs:
            yield f"{what}: {mine}, served {theirs}"
    for symbol, key in SIZES.items():
        if new[symbol] != served[symbol]:
            yield f"{key}: {new[symbol]}, served {served[symbol]}"
    for key in sorted(new.raw.keys() & served.raw.keys() - WITHOUT_MEANING - set(SIZES.values())):
        mine, theirs = new.raw[key], served.raw[key]
        if key.startswith("_"):
            continue
        if mine != theirs and isinstance(mine, int | float | str) and isinstance(theirs, int | float | str):
            yield f"{key}: {mine!r}, served {theirs!r}"


def _require_whole(runner: Runner) -> None:
    """IncompleteLoadError where every parameter was asked for and the folder lacks tensors."""
    if not envs.WHOLE_UPDATES.get():
        return
    vocabulary, kind = runner.state.vocabulary, runner.state.wiring.kind
    lacking = [name for name in vocabulary.tensors if not of_another(name, kind) and name not in runner.sent]
    if lacking:
        raise IncompleteLoadError(
            f"the folder lacks {counted(len(lacking), 'tensor')} of the {runner.role}",
            found=f"no {collapse(lacking)[0]}",
            expected=f"every tensor, since {envs.WHOLE_UPDATES.name}=1",
            remedy="Write the whole model into the folder.",
            details=collapse(lacking)[1:],
        )


def _digest(checkpoint: Checkpoint) -> str:
    """Of config.json and every shard's header, size and some data."""
    config = checkpoint.storage.read(CONFIG_FILE, 0, checkpoint.files[CONFIG_FILE])
    shards = [(shard, *seen(checkpoint.storage, checkpoint.header(shard))) for shard in checkpoint.shards]
    return hashlib.sha256(config + repr(shards).encode()).hexdigest()

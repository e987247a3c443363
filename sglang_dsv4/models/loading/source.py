"""Where the tensors of an initial load come from: only the shards that hold what the load needs, only its tensors.

SGLang's loaders are lazy generators over every tensor of every shard. For our classes they are replaced by a source
that reads the headers first, so that a draft opens its own shards alone and a rank never reads the experts of another
one.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.expected import NAMES, compare
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import detect_layout
from sglang_dsv4.checkpoint.names import collapse, counted, is_draft
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import PREFIX, StorageError
from sglang_dsv4.models.loading.fallbacks import STRAY_SCALE, absent_sinks_of, fallback_lines, stray_scales
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.stream.fallbacks import absent_sinks

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.plan import Plan
    from sglang_dsv4.stream import Named

logger = logging.getLogger(__name__)

Lifetime = Literal["step", "owned", "mapped"]
"""How long a tensor is valid: until the next step; while it is held, in memory of its own; so, in a file's pages."""

UNKNOWN_NAME = "a name that no dialect knows"

PENDING = "_dsv4_source"
"""Attribute of a model between the moment its loader asks for weights and its load_weights."""

Reader = Callable[[dict[str, list[str]]], "Iterator[Named]"]
"""Reads {shard: [tensor names in file order]}."""


class Loadable(Protocol):
    """A model class of ours: it can say what it will load before it loads."""

    def loading_plan(self) -> Plan:
        """What a load of this model does, decided anew from how it is built."""
        ...


class Source:
    """The tensors of one initial load, in file order, by their native names.

    lifetime: how long a tensor stays valid, and what keeping it costs.
    """

    def __init__(self, checkpoint: Checkpoint, read: Reader, *, lifetime: Lifetime, label: str) -> None:
        self.checkpoint = checkpoint
        self.lifetime = lifetime
        self.label = label
        self._read = read

    def tensors(self, plan: Plan, report: LoadReport) -> Iterator[Named]:
        """What the plan's share keeps; everything else is counted as skipped and never read. Plans at once, reads
        lazily.

        Raises IncompleteLoadError, before a byte of data is read, when the headers show that the load cannot be
        complete, and what reading headers raises.
        """
        native = self._native_names(plan, report)
        draft = plan.share.kind != "target"
        infos = self.checkpoint.select(self.checkpoint.shards_for(lambda name: is_draft(name) == draft))
        view = NativeView((info for info in infos.values() if is_draft(info.name) == draft), self.checkpoint.dialect)
        self._require_complete(view)
        for name in stray_scales(view):
            if native.pop(name, None) is not None:
                report.skipped[STRAY_SCALE] += 1
        sinks = absent_sinks_of(view, plan)
        report.fallbacks += fallback_lines(view, self.checkpoint.config, plan, sinks)
        wanted: dict[str, list[str]] = {}
        for name in sorted(native.keys() & infos.keys(), key=lambda name: (infos[name].shard, infos[name].start)):
            wanted.setdefault(infos[name].shard, []).append(name)
        report.source = self.label
        report.shards_opened, report.shards_total = len(wanted), len(self.checkpoint.shards)
        report.planned = sum(map(len, wanted.values()))
        return absent_sinks(((native[name], tensor) for name, tensor in self._delivered(wanted)), sinks, plan.heads)

    def _delivered(self, wanted: dict[str, list[str]]) -> Iterator[Named]:
        """What the reader yields: all that is wanted, each tensor once. Raises StorageError when it is not."""
        due = {name for names in wanted.values() for name in names}
        for name, tensor in self._read(wanted):
            if name not in due:
                raise self._misread(f"{name}, which was not wanted or came before", [])
            due.remove(name)
            yield name, tensor
        if due:
            raise self._misread(f"the end, with {counted(len(due), 'tensor')} still to come", collapse(sorted(due)))

    def _misread(self, found: str, details: list[str]) -> StorageError:
        return StorageError(
            f"{self.label}: the reader did not deliver what the headers promise",
            found=found,
            expected="every tensor of the load, once",
            remedy="Nothing of this load is kept; try again, or another --load-format.",
            details=details,
        )

    def _native_names(self, plan: Plan, report: LoadReport) -> dict[str, str]:
        """Name in the file -> native name of every tensor that the share keeps; the rest is counted as skipped."""
        dialect = self.checkpoint.dialect
        kept = {}
        for name in self.checkpoint.names():
            if not dialect.knows(name):
                report.skipped[UNKNOWN_NAME] += 1
                continue
            native = dialect.to_native(name)
            reason = plan.share.reason_to_skip(native)
            if reason is None:
                kept[name] = native
            else:
                report.skipped[reason] += 1
        return kept

    def _require_complete(self, view: NativeView) -> None:
        """Compare this half of the checkpoint (target or draft), all its stages, with the model of its config."""
        completeness = compare(view, self.checkpoint.config, detect_layout(view, self.checkpoint.config))
        completeness.raise_if_incomplete(self.checkpoint.storage.uri, strict=envs.STRICT.get())
        for line in completeness.lines(*NAMES):
            logger.warning("%s%s=0 lets this pass: %s", PREFIX, envs.STRICT.name, line)


def take_pending(model: Any) -> Source | None:
    """The source that the loader's hook left on the model, at most once."""
    return model.__dict__.pop(PENDING, None)


def open_local(original: Callable[..., Iterator], loader: Any, model_config: Any, model: Any) -> Iterator:
    """AROUND DefaultModelLoader._get_all_weights: memory-mapped (or plain) reads of local safetensors files."""
    if not hasattr(model, "loading_plan"):
        return original(loader, model_config, model)
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    overrides = getattr(model, "allow_patterns_overrides", None)
    folder, _files, is_safetensors = loader._prepare_weights(path, model_config.revision, False, overrides)
    if not is_safetensors:
        return original(loader, model_config, model)
    options = _model_options()
    reader = LocalReader(
        folder,
        mapped=not options.weight_loader_disable_mmap,
        read_ahead=options.weight_loader_prefetch_checkpoints,
        drop_cache=options.weight_loader_drop_cache_after_load,
    )
    lifetime: Lifetime = "owned" if options.weight_loader_disable_mmap else "mapped"
    return _leave(model, Source(Checkpoint.open(folder), reader, lifetime=lifetime, label=f"{folder} ({reader.kind})"))


def open_streamed(original: Callable[..., Iterator], loader: Any, model_config: Any, model: Any) -> Iterator:
    """AROUND RunaiModelStreamerLoader._get_all_weights: local files or object storage through the RunAI streamer."""
    if not hasattr(model, "loading_plan"):
        return original(loader, model_config, model)
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    folder, _files = loader._prepare_weights(path, model_config.revision)
    reader = StreamerReader(folder, distributed=bool(loader._is_distributed))
    return _leave(model, Source(Checkpoint.open(folder), reader, lifetime="step", label=f"{folder} (RunAI streamer)"))


def _leave(model: Any, source: Source) -> Iterator:
    setattr(model, PENDING, source)
    return iter(())  # what load_weights is handed; it finds the source on the model


def _model_options() -> Any:
    from sglang.srt.runtime_context import get_model

    return get_model()


@contextmanager
def _named(place: str | Path) -> Iterator[None]:
    """StorageError that says where, for whatever a reader raises: safetensors and the streamer name no file."""
    try:
        yield
    except Exception as error:
        raise StorageError(
            f"{place}: reading it failed",
            found=f"{type(error).__name__}: {error}",
            expected="what the headers had promised",
            remedy="Nothing of this load is kept; see that the files are whole and the storage answers, and try again.",
        ) from error


class LocalReader:
    """Reads local shards through safetensors.

    mapped: memory-map (a tensor's pages are read when they are touched) or read each tensor into memory of its own.
    read_ahead: ask the kernel for the next shard's pages. drop_cache: tell it to forget a shard that is done.
    """

    def __init__(self, folder: str, *, mapped: bool = True, read_ahead: bool = False, drop_cache: bool = False) -> None:
        self._folder = Path(folder)
        self._mapped = mapped
        self._read_ahead = read_ahead
        self._drop_cache = drop_cache

    @property
    def kind(self) -> str:
        """How it reads, for the report."""
        return "memory map" if self._mapped else "read"

    def __call__(self, wanted: dict[str, list[str]]) -> Iterator[Named]:
        from safetensors import safe_open

        backend = {} if self._mapped else {"backend": "pread"}
        shards = list(wanted)
        for number, shard in enumerate(shards):
            if self._read_ahead:
                for near in shards[number : number + 2]:
                    self._advise(near, os.POSIX_FADV_WILLNEED)
            path = self._folder / shard
            with _named(path), safe_open(path, framework="pt", device="cpu", **backend) as file:
                for name in wanted[shard]:
                    yield name, file.get_tensor(name)
            if self._drop_cache:
                self._advise(shard, os.POSIX_FADV_DONTNEED)

    def _advise(self, shard: str, advice: int) -> None:
        descriptor = os.open(self._folder / shard, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, advice)
        finally:
            os.close(descriptor)


class StreamerReader:
    """Reads shards through the RunAI streamer, from a folder or object storage.

    From 0.17 the streamer is told which tensors to read; older ones read whole shards and reuse one buffer.
    """

    def __init__(self, folder: str, *, distributed: bool) -> None:
        self._folder = folder.rstrip("/")
        self._distributed = distributed

    def __call__(self, wanted: dict[str, list[str]]) -> Iterator[Named]:
        from runai_model_streamer import SafetensorsStreamer

        names = {name for kept in wanted.values() for name in kept}
        selects = "tensor_names" in inspect.signature(SafetensorsStreamer.stream_files).parameters
        with _named(self._folder), SafetensorsStreamer() as streamer:
            streamer.stream_files(
                [f"{self._folder}/{shard}" for shard in wanted],
                device=self._device(),
                is_distributed=self._distributed,
                **({"tensor_names": names} if selects else {}),
            )
            for name, tensor in streamer.get_tensors():
                if name in names:
                    yield name, tensor

    def _device(self) -> str:
        if not self._distributed:
            return "cpu"
        from sglang.srt.utils.common import get_device, is_cuda_alike

        return get_device() if is_cuda_alike() else "cpu"

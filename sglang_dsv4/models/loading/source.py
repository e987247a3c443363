"""Where the tensors of an initial load come from: only the shards that hold what the load needs, only its tensors.

SGLang's loaders are lazy generators over every tensor of every shard. For our classes they are replaced by a source
that reads the headers first, so that a draft opens its own shards alone and a rank never reads the experts of another
one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_dsv4 import envs
from sglang_dsv4.checkpoint.expected import NAMES, compare
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import Checkpoint
from sglang_dsv4.checkpoint.layout import detect_layout
from sglang_dsv4.checkpoint.names import collapse, counted, is_draft
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import PREFIX, Dsv4Error, NumericsError, StorageError, StreamError
from sglang_dsv4.models.loading.agreement import Agreement, agree, require_one_list
from sglang_dsv4.models.loading.fallbacks import STRAY_SCALE, absent_sinks_of, fallback_lines, stray_scales
from sglang_dsv4.models.loading.peers import GRACE, LEAVING, Peers, heard_by_all, peers_of
from sglang_dsv4.models.loading.readers import Lifetime, LocalReader, Reader, StreamerReader
from sglang_dsv4.models.loading.report import LoadReport
from sglang_dsv4.stream.fallbacks import absent_sinks

if TYPE_CHECKING:
    from sglang_dsv4.models.loading.plan import Plan
    from sglang_dsv4.stream import Named

logger = logging.getLogger(__name__)

UNKNOWN_NAME = "a name that no dialect knows"

PENDING = "_dsv4_source"
"""Attribute of a model between the moment its loader asks for weights and its load_weights."""


class Source:
    """The tensors of one initial load, in the order in which its reader gives them, by their native names.

    lifetime: how long a tensor stays valid. reading: the tensor that came last.
    """

    def __init__(self, checkpoint: Checkpoint, reader: Reader) -> None:
        self.checkpoint = checkpoint
        self._reader = reader
        self._opened: set[str] = set()
        self.reading: TensorInfo | None = None

    @property
    def lifetime(self) -> Lifetime:
        """Of a tensor, and what keeping it costs."""
        return self._reader.lifetime

    def tensors(self, plan: Plan, peers: Peers, report: LoadReport) -> Iterator[Named]:
        """What the plan's share keeps; everything else is counted as skipped and never given. Plans and agrees at once
        (collective over `peers`), reads lazily.

        Raises IncompleteLoadError, before a byte of data is read, when the headers show that the load cannot be
        complete, what `agree` raises, and what reading headers raises.
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
        wanted = {name: infos[name] for name in native.keys() & infos.keys()}
        largest = max((info.nbytes for info in infos.values()), default=0)
        agreement = agree(peers, self.checkpoint, infos, wanted, self._reader.separate(largest))
        self._opened = {info.shard for info in agreement.listed}
        report.agreement = agreement.line
        report.source = f"{self.checkpoint.storage.uri} ({self._reader.label(shared=agreement.shared)})"
        report.shards_opened, report.shards_total = len(self._opened), len(self.checkpoint.shards)
        report.planned = len(wanted)
        delivered = self._delivered(agreement, set(wanted), peers)
        return absent_sinks(((native[name], tensor) for name, tensor in delivered), sinks, plan.heads)

    @contextmanager
    def naming_the_file(self) -> Iterator[None]:
        """What is wrong with a tensor names the file that it, or its partner, came from."""
        try:
            yield
        except (NumericsError, StreamError) as error:
            if self.reading is not None:
                error.in_file(self.checkpoint.storage.locate(self.reading.shard))
            raise

    def require_unchanged(self) -> None:
        """StorageError when a shard that was read is no longer the file whose header was read."""
        self.checkpoint.storage.require_unchanged(sorted(self._opened))

    def _delivered(self, agreement: Agreement, wanted: set[str], peers: Peers) -> Iterator[Named]:
        """What the reader yields: all that is wanted, each tensor once; of what is listed for other ranks, nothing.

        Raises StorageError when it is not, LostRankError when that is another rank's doing.
        """
        due = {info.name: info for info in agreement.listed}
        stream = self._reader.read(agreement.listed, shared=agreement.shared, confirm=partial(require_one_list, peers))
        try:
            for name, tensor in stream:
                info = due.pop(name, None)
                if info is None:
                    raise self._misread(f"{name}, which was not listed or came before", [])
                self.reading = info
                peers.announce(info.shard)
                if name in wanted:
                    yield name, tensor
        except StorageError as error:
            # The streamer raises ValueError for storage. RuntimeError is a collective's, which another rank has left.
            left = isinstance(error.__cause__, RuntimeError)
            lost = peers.lost(LEAVING if left else GRACE) if agreement.shared else None
            if lost is not None:
                raise lost from error
            self.require_unchanged()  # says which file, where one was replaced or cut short
            waiting = sorted({info.shard for info in due.values()})
            error.details += tuple(f"not read to its end: {shard}" for shard in waiting)
            raise
        if due:
            raise self._misread(f"the end, with {counted(len(due), 'tensor')} still to come", collapse(sorted(due)))

    def _misread(self, found: str, details: list[str]) -> StorageError:
        return StorageError(
            f"{self.checkpoint.storage.uri}: the reader did not deliver what the headers promise",
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
    if not hasattr(model, "loader_state"):
        return original(loader, model_config, model)
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    overrides = getattr(model, "allow_patterns_overrides", None)
    with _heard(model, path):
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
    return _leave(model, folder, reader)


def open_streamed(original: Callable[..., Iterator], loader: Any, model_config: Any, model: Any) -> Iterator:
    """AROUND RunaiModelStreamerLoader._get_all_weights: local files or object storage through the RunAI streamer."""
    if not hasattr(model, "loader_state"):
        return original(loader, model_config, model)
    path = getattr(model_config, "model_weights", None) or model_config.model_path
    with _heard(model, path):
        folder, _files = loader._prepare_weights(path, model_config.revision)
    return _leave(model, folder, StreamerReader(folder, distributed=bool(loader._is_distributed)))


def _leave(model: Any, folder: str, reader: Reader) -> Iterator:
    with _heard(model, folder):
        setattr(model, PENDING, Source(Checkpoint.open(folder), reader))
    return iter(())  # what load_weights is handed; it finds the source on the model


@contextmanager
def _heard(model: Any, path: str) -> Iterator[None]:
    """Let the other ranks hear what goes wrong; SGLang's own errors about files become StorageError."""
    with heard_by_all(peers_of(model.loader_state.wiring.kind)):
        try:
            yield
        except Dsv4Error:
            raise
        except Exception as error:
            raise StorageError(
                f"{path}: SGLang cannot find the files of this checkpoint",
                found=f"{type(error).__name__}: {' '.join(str(error).split())}",
                expected="config.json, the index and every shard that it names",
                remedy="Run `sglang-dsv4 check` on it, on this machine.",
            ) from error


def _model_options() -> Any:
    from sglang.srt.runtime_context import get_model

    return get_model()

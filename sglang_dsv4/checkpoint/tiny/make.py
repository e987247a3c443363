"""`make-tiny` without its command line: puts configuration, grammar, layout, numbers and files together."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from sglang_dsv4.checkpoint.config import ModelConfigFacts
from sglang_dsv4.checkpoint.index import CONFIG_FILE, INDEX_FILE
from sglang_dsv4.checkpoint.tiny.config import Config, Draft, draft_of, native_config
from sglang_dsv4.checkpoint.tiny.grammar import Slot, slots
from sglang_dsv4.checkpoint.tiny.layouts import Layout, Storage, choose
from sglang_dsv4.checkpoint.tiny.quantize import Numbers
from sglang_dsv4.checkpoint.tiny.sources import Drawn, Native
from sglang_dsv4.checkpoint.tiny.storage import plain, stored
from sglang_dsv4.checkpoint.tiny.tokenizer import write_json, write_tokenizer
from sglang_dsv4.checkpoint.tiny.write import Entry, write_checkpoint
from sglang_dsv4.errors import FlagError, RefusedError

WO_A_LAYOUTS = (("native", "fp4", "e8m0"), ("native", "fp8", "e8m0"))
"""Where a BF16 `wo_a` is known: DeepSeek's inference format, and the FP8 conversions by sgl-project."""


@dataclass(frozen=True)
class Options:
    """What to make. None takes the layout's, the shape's or the source's own.

    `source` is the folder of a native checkpoint whose numbers are taken; it excludes `shape`, `layers` and `experts`
    (a count). `shards` counts files; None writes one for the embedding, each layer, the head and each draft module,
    as the releases do. `sparse` writes headers and holes: what `check` reads, in no space, at any size.
    """

    names: str = "native"
    expert_format: str | None = None
    scales: str | None = None
    wo_a: str = "fp8"
    draft: Draft | None = None
    shards: int | None = None
    seed: int = 0
    source: Path | None = None
    shape: str = "tiny"
    layers: int | None = None
    experts: int | None = None
    sparse: bool = False


@dataclass(frozen=True)
class Made:
    """What was written: tensors, their bytes, and a line for each tensor that the layout holds only rounded."""

    layout: Layout
    draft: Draft
    shards: int
    tensors: int
    nbytes: int
    rounded: list[str]


def make_tiny(folder: Path, options: Options) -> Made:
    """Writes a checkpoint with config, tokenizer and index into `folder`.

    Raises `FlagError` for options that no public layout has, `RefusedError` when `folder` holds weights already,
    `InexactConversionError` when the layout cannot hold the numbers, and for a source whatever reading it raises. What
    fails leaves no file behind.
    """
    numbers, config = _numbers(options)
    return write_model(folder, options, config, numbers)


def write_model(folder: Path, options: Options, config: Config, numbers: Callable[[Slot], Numbers]) -> Made:
    """The same for numbers of any kind: `numbers` gives each tensor of the native `config` in its native form."""
    draft = draft_of(config)
    layout = layout_of(options, draft)
    if any(folder.glob("*.safetensors")):
        raise RefusedError(f"{folder} holds weights already", remedy="Name an empty folder.")
    shards = divide(list(entries(layout, config, draft)), options.shards)
    with _all_or_nothing(folder):
        rounded = write_checkpoint(folder, shards, None if options.sparse else numbers)
        written = copy.deepcopy(config)
        layout.config(written)
        write_json(folder / "config.json", written)
        _write_companions(folder, options.source)
    flat = [tensor for shard in shards for entry in shard for tensor in entry.stored]
    return Made(layout, draft, len(shards), len(flat), sum(tensor.nbytes for tensor in flat), rounded)


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[None]:
    """The folder, made when absent. An exception removes what is new in it, and the folders that were made for it."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    before = set() if absent else set(folder.iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before:
            path.unlink()
        for path in absent:
            path.rmdir()
        raise


def layout_of(options: Options, draft: Draft) -> Layout:
    """The layout that the options name. Raises `FlagError`."""
    layout = choose(options.names, draft, options.expert_format, options.scales)
    if options.wo_a == "fp8":
        return layout
    if (layout.names, layout.experts, layout.scales) not in WO_A_LAYOUTS:
        raise FlagError(
            "--wo-a bf16: no DeepSeek-V4 checkpoint has this layout",
            found=layout.options(),
            expected=" or ".join(f"--names {n} --experts {e} --scales {s}" for n, e, s in WO_A_LAYOUTS),
            remedy="Use one of these, or leave out --wo-a.",
        )
    return replace(layout, storage={**layout.storage, "wo_a": plain("BF16")})


def entries(layout: Layout, config: Config, draft: Draft) -> Iterator[list[Entry]]:
    """Every tensor of the checkpoint as `layout` stores and names it, one list per shard of a release."""
    for group in slots(ModelConfigFacts.from_json(config), draft):
        in_draft = group[0].name.startswith("mtp.")
        storage = (in_draft and layout.draft_storage) or layout.storage
        made = [_entry(layout, slot, slot.name, storage) for slot in group]
        if in_draft and layout.draft_embedding:
            shape = (config["vocab_size"], config["hidden_size"])
            for role, name in (("embed", "mtp.0.emb.tok_emb.weight"), ("head", "mtp.0.head.weight")):
                made.append(_entry(layout, Slot(f"{role}.weight", role, shape), name, storage))
        yield made


def _entry(layout: Layout, slot: Slot, name: str, storage: Storage) -> Entry:
    scheme = storage[slot.role]
    return Entry(slot, scheme, stored(name, slot.shape, scheme, layout.dialect))


def divide(groups: list[list[Entry]], shards: int | None) -> list[list[Entry]]:
    """The groups as they are, or all entries in order dealt out to `shards` files. Raises `FlagError` for too many."""
    if shards is None:
        return groups
    flat = [entry for group in groups for entry in group]
    if not 1 <= shards <= len(flat):
        expected = f"1 to {len(flat)} for this model"
        raise FlagError(f"--shards {shards}", expected=expected, remedy="Leave it out for one file per layer.")
    cuts = [len(flat) * index // shards for index in range(shards + 1)]
    return [flat[start:end] for start, end in pairwise(cuts)]


def _numbers(options: Options) -> tuple[Callable[[Slot], Numbers], Config]:
    """Where the numbers come from, and the native config that goes with them."""
    if options.source is None:
        config = native_config(options.shape, options.draft or "none", options.layers, options.experts)
        return Drawn(options.seed, config["n_routed_experts"]), config
    if options.shape != "tiny" or options.layers or options.experts:
        raise FlagError(
            "--from and a shape of its own",
            expected="one of --from and --shape, --layers, --num-experts",
            remedy="Leave out --from, or the other three.",
        )
    source = Native(options.source, options.seed, options.draft)
    return source, source.config


def _write_companions(folder: Path, source: Path | None) -> None:
    """Tokenizer and generation config; with a source, everything there that is neither weights nor about them."""
    if source is None:
        write_tokenizer(folder)
        write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
        return
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (CONFIG_FILE, INDEX_FILE):
            shutil.copyfile(file, folder / file.name)

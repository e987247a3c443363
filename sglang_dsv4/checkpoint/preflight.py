"""What can be known of a checkpoint before SGLang starts: whether it is whole, and what it holds. No tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from sglang_dsv4.checkpoint.config_reader import RELEASED
from sglang_dsv4.checkpoint.expected import Completeness, compare
from sglang_dsv4.checkpoint.headers import TensorInfo
from sglang_dsv4.checkpoint.index import CONFIG_FILE, Checkpoint
from sglang_dsv4.checkpoint.layout import BLOCK_KEY, Disagreement, Layout, disagreements, survey_layout
from sglang_dsv4.checkpoint.names import is_draft
from sglang_dsv4.checkpoint.view import NativeView
from sglang_dsv4.errors import ConfigError, Dsv4Error, HeaderError, IncompleteLoadError, TruncatedShardError


@dataclass(frozen=True)
class Inspection:
    """Everything that config.json and all headers tell of one checkpoint.

    target, draft: where the tensors differ from the model of the config, for each half. claims: where config.json and
    the tensors tell different stories.
    """

    checkpoint: Checkpoint
    view: NativeView
    layout: Layout
    target: Completeness
    draft: Completeness
    claims: tuple[Disagreement, ...]


def survey(
    path: str | os.PathLike[str],
    *,
    target: bool = True,
    draft: bool = False,
    strict: bool = True,
    revision: str | None = None,
    cache_dir: str | None = None,
) -> tuple[Inspection | None, list[Dsv4Error]]:
    """Inspect a checkpoint; returns what it holds and everything that is wrong with it.

    target, draft: the halves that will be loaded; a missing, unexpected or wrong tensor of the other is no fault. With
    `strict` off only a wrong one of these is, and one that is missing of a module that is there in part. The inspection
    is None where the faults leave nothing to inspect. Raises nothing of this package: no folder, no config, a broken
    header or index, unknown names, an unknown layout are all returned.
    """
    faults: list[Dsv4Error] = []
    try:
        checkpoint = Checkpoint.open(path, revision=revision, cache_dir=cache_dir)
        tensors, faults = checkpoint.survey(checkpoint.shards)
        if any(isinstance(fault, (HeaderError, TruncatedShardError)) for fault in faults):
            return None, faults
        inspection, found = _inspect(checkpoint, tensors.values(), target=target)
    except Dsv4Error as error:
        return None, [*faults, *error.parts]
    for wanted, half in ((target, inspection.target), (draft, inspection.draft)):
        try:
            if wanted:
                half.raise_if_incomplete(checkpoint.storage.uri, strict=strict)
        except IncompleteLoadError as error:
            faults.append(error)
    return inspection, [*faults, *found]  # what is missing comes first: the layout may be unclear because of it


def _inspect(
    checkpoint: Checkpoint, tensors: Iterable[TensorInfo], *, target: bool
) -> tuple[Inspection, list[Dsv4Error]]:
    view, config = NativeView(tensors), checkpoint.config
    layout, faults = survey_layout(view, config)
    found = compare(view, config, layout, target=target)
    untold = bool(view.stages()) and not layout.stages
    draft = Completeness() if untold else _half(found, draft=True)
    claims = tuple(disagreements(config, layout))
    misled = [_misled(checkpoint, claim) for claim in claims if claim.key == BLOCK_KEY]
    return Inspection(checkpoint, view, layout, _half(found, draft=False), draft, claims), [*faults, *misled]


def _misled(checkpoint: Checkpoint, claim: Disagreement) -> ConfigError:
    return ConfigError(
        f"{checkpoint.storage.locate(CONFIG_FILE)}: {claim.key} is not the block of the scales",
        found=claim.claimed,
        expected=f"{claim.found}, which the shapes say",
        remedy=RELEASED,
    )


def _half(found: Completeness, *, draft: bool) -> Completeness:
    groups = {field.name: getattr(found, field.name) for field in fields(found)}
    return Completeness(
        **{name: tuple(line for line in lines if is_draft(line) == draft) for name, lines in groups.items()}
    )

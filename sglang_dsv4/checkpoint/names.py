"""Tensor names as dotted paths: split off their indices, put them back, and write many of them in few lines.

Everything that compares names works on whole path parts, so that `w1` never matches inside `markov_w1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

INDEX = "*"
"""What stands for an index in a template: `layers.3.attn.wkv` has the template `layers.*.attn.wkv`."""

# A part is an index when it is a number written the usual way; `007` stays text, so that joining gives back the name.
_INDEX_PART = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")


def split_indices(name: str) -> tuple[str, list[str]]:
    """The template of `name` and its indices, left to right: `layers.3.w` -> (`layers.*.w`, ['3'])."""
    return _INDEX_PART.sub(INDEX, name), _INDEX_PART.findall(name)


def join_indices(template: str, indices: Sequence[str]) -> str:
    """The inverse of `split_indices`."""
    if not indices:
        return template
    head, *rest = template.split(INDEX)
    return head + "".join(index + text for index, text in zip(indices, rest, strict=True))


def is_draft(name: str) -> bool:
    """Whether a tensor, or a line of `collapse`, belongs to a draft, in any dialect."""
    return name.startswith(("mtp.", "model.mtp."))


def collapse(names: Iterable[str]) -> list[str]:
    """Write names in as few lines as their indices allow, in order of first appearance.

    `layers.0.a`, `layers.1.a`, `layers.3.a` become `layers.{0,1,3}.a`; three or more in a row become `{0..2}`. Exact:
    the lines stand for the given names and no others.
    """
    groups: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        template, indices = split_indices(name)
        groups.setdefault(template, set()).add(tuple(map(int, indices)))
    return [join_indices(template, line) for template, rows in groups.items() for line in _products(rows)]


def _products(rows: set[tuple[int, ...]]) -> list[list[str]]:
    """Cover index tuples of one length by products of index sets, exactly."""
    if rows == {()}:
        return [[]]
    tails_of: dict[int, set[tuple[int, ...]]] = {}
    for first, *tail in rows:
        tails_of.setdefault(first, set()).add(tuple(tail))
    firsts_of: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first in sorted(tails_of):
        firsts_of.setdefault(frozenset(tails_of[first]), []).append(first)
    return [[ranges(firsts), *line] for tails, firsts in firsts_of.items() for line in _products(set(tails))]


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `{0..2,5}`; a single number stands alone."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    text = ",".join(parts)
    return text if text.isdigit() else "{" + text + "}"


def counted(count: int, noun: str) -> str:
    """`1 kind`, `2 kinds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def samples(names: Iterable[str], limit: int = 5) -> list[str]:
    """The first collapsed lines of `names`, and one that counts the rest: what an error message can bear."""
    lines = [shorten(line) for line in collapse(names)]
    return lines if len(lines) <= limit else [*lines[:limit], f"... and {len(lines) - limit} more"]


def shorten(text: str, limit: int = 120) -> str:
    """`text` made printable and cut to `limit` characters; names in hostile files may be anything."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

"""Which known name a name of an environment flag was meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def closest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` is a misspelling of: up to three letters off, or the same words in another order or
    with one too many or too few. None when there is none; the nearest, then the first, when there are several.
    """
    words = sorted(name.upper().split("_"))
    best: tuple[int, str] | None = None
    for candidate in candidates:
        distance = edit_distance(name.upper(), candidate)
        if distance > 3 and not _same_words(words, sorted(candidate.split("_"))):
            continue
        if best is None or (distance, candidate) < best:
            best = (distance, candidate)
    return best[1] if best else None


def _same_words(one: list[str], other: list[str]) -> bool:
    longer, shorter = sorted((one, other), key=len, reverse=True)
    rest = list(longer)
    for word in shorter:
        if word not in rest:
            return False
        rest.remove(word)
    return len(rest) <= 1 and "DSV4" in shorter


def edit_distance(one: str, other: str) -> int:
    """Letters to insert, delete, replace or swap with their neighbour to make one string the other."""
    before_last: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before_last[j - 2] + 1)
            row.append(cost)
        before_last, last = last, row
    return last[-1]

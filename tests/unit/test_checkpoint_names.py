"""Collapsed names stand for exactly the names that went in."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dsv4.checkpoint.names import collapse, counted, join_indices, samples, shorten, split_indices


def unfold(line: str) -> list[str]:
    """The names a collapsed line stands for, by the notation's own words."""
    choices = []
    for piece in re.split(r"(\{[^}]*\})", line):
        if not piece.startswith("{"):
            choices.append([piece])
            continue
        numbers = []
        for part in piece[1:-1].split(","):
            first, _, last = part.partition("..")
            numbers += range(int(first), int(last or first) + 1)
        choices.append([str(number) for number in numbers])
    return ["".join(parts) for parts in itertools.product(*choices)]


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        ([f"layers.{n}.attn.wo_a.scale" for n in range(43)], ["layers.{0..42}.attn.wo_a.scale"]),
        (["layers.0.a", "layers.1.a", "layers.3.a"], ["layers.{0,1,3}.a"]),
        (["a", "b"], ["a", "b"]),
        (["layers.7.a"], ["layers.7.a"]),
        (
            [f"layers.{n}.e.{e}.w" for n in range(3) for e in range(4) if (n, e) != (1, 2)],
            ["layers.{0,2}.e.{0..3}.w", "layers.1.e.{0,1,3}.w"],
        ),
        (["x.007.w", "x.08.w"], ["x.007.w", "x.08.w"]),
    ],
)
def test_collapse(names, lines):
    assert collapse(names) == lines


@given(st.sets(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1))
def test_collapse_is_exact(pairs):
    names = [f"layers.{a}.experts.{b}.w1" for a, b in pairs]
    unfolded = [name for line in collapse(names) for name in unfold(line)]
    assert sorted(unfolded) == sorted(names)


@given(
    st.lists(st.sampled_from(["layers", "0", "17", "007", "w1", "", "3x", "999999999999"]), min_size=1).map(".".join)
)
def test_splitting_is_undone_by_joining(name):
    assert join_indices(*split_indices(name)) == name


def test_samples_count_what_they_leave_out():
    assert samples([f"name{letter}" for letter in "abcdefgh"], limit=2) == ["namea", "nameb", "... and 6 more"]


def test_counted_agrees_with_its_number():
    assert [counted(n, "kind") for n in (0, 1, 2)] == ["0 kinds", "1 kind", "2 kinds"]


def test_shorten_makes_text_printable():
    assert shorten("a\x00b") == "a\\x00b"
    assert len(shorten("x" * 500)) == 120

"""The static range check finds what is gone, and the pinned release has every row."""

from __future__ import annotations

import importlib.metadata

import pytest
from series_tools import overlay, upstream

from sglang_dsv4 import compat

FILES = {
    "sglang/srt/steps.py": 'ALLOWED = frozenset({"first"})\n',
    "sglang/srt/pipeline.py": "def resolve(args):\n    from sglang.srt.steps import first\n    run_hook(first, args)\n",
    "sglang/srt/base.py": (
        "class Base:\n    def load(self, model, *, strict=True): ...\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
    ),
    "sglang/srt/loader/__init__.py": "from ..base import Base as Parent\nfrom .inner import helper\n",
    "sglang/srt/loader/inner.py": (
        "from sglang.srt.base import Base\n"
        "class Loader(Base):\n    kind: str = 'x'\n"
        "if True:\n    def helper(a, b): ...\n"
    ),
}


@pytest.fixture
def source(monkeypatch):
    monkeypatch.setattr(compat, "OVERRIDABLE_STEPS", "sglang.srt.steps.ALLOWED")
    return upstream.Source(FILES.get)


def fault(source, target, kind="uses", parameters=None):
    return upstream.fault(source, compat.Seam(target, kind, parameters, "", ""))


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("sglang.srt.base.Base.load", ("self", "model", "strict")),
        ("sglang.srt.loader.Parent.load", ("self", "model")),
        ("sglang.srt.loader.helper", ("a",)),
        ("sglang.srt.loader.inner.Loader.kind", None),
        ("sglang.srt.base.fast", None),
    ],
)
def test_names_are_found_through_imports_bases_and_branches(source, target, parameters):
    assert fault(source, target, parameters=parameters) is None


def test_inherited_members_are_found(source):
    local = {**FILES, "sglang/srt/same.py": "class A:\n    def f(self): ...\nclass B(A): ...\n"}
    assert fault(upstream.Source(local.get), "sglang.srt.same.B.f", parameters=("self",)) is None


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        ("sglang.srt.base.Base.save", None, "gone"),
        ("sglang.srt.nowhere.Base", None, "gone"),
        ("sglang.srt.base.Other", None, "gone"),
        ("sglang.srt.base.Base.load", ("self", "weights"), r"takes \(self, model, strict\), not \(self, weights"),
    ],
)
def test_what_is_gone_or_changed_is_told(source, target, parameters, message):
    with pytest.raises(AssertionError, match=message):
        assert fault(source, target, parameters=parameters) is None


def test_steps_must_be_allowed_and_run(source):
    assert fault(source, "sglang.srt.pipeline.first", "step") is None
    assert "no step" in fault(source, "sglang.srt.pipeline.second", "step")
    idle = upstream.Source({**FILES, "sglang/srt/pipeline.py": ""}.get)
    assert "never run" in fault(idle, "sglang.srt.pipeline.first", "step")


def test_the_pinned_release_has_every_row():
    assert importlib.metadata.version("sglang") == compat.PINNED
    source = upstream.Source.of_folder(overlay.installed())
    assert upstream.broken_rows(source) == []


@pytest.mark.parametrize("seam", compat.SEAMS, ids=lambda seam: seam.target.rpartition(".")[2])
def test_each_row_can_fail(seam):
    """Against a release in which the file of the row is empty."""
    empty = upstream.Source(lambda name: "" if name.endswith(".py") else None)
    assert upstream.fault(empty, seam) is not None

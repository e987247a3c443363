"""Every environment flag we read or steer: name, type, default, meaning and owner.

Ours start with SGLANG_DSV4_PLUGIN_. The others are SGLang's own flags that steer how DeepSeek-V4 is loaded; we read
them as SGLang does (`srt/environ.py`), with two differences. A value that cannot be read is an error here, where SGLang
warns and takes the default. And a name that looks like a misspelling of a known flag is an error, where SGLang ignores
it.

A flag that is not set is never the same as a flag set to its default: `Flag.explicit()` returns None for the first.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_dsv4.errors import FlagError
from sglang_dsv4.spelling import closest, edit_distance

TRUE = ("1", "true", "yes", "y")
FALSE = ("0", "false", "no", "n")
"""The spellings of SGLang's EnvBool (srt/environ.py), in any case. `on` and `off` are not among them."""
UNSET = "None"

PLUGIN_PREFIX = "SGLANG_DSV4_PLUGIN_"
CHECKED_PREFIXES = ("SGLANG_DSV4", "SGLANG_OPT_")
"""Names with these prefixes are checked for spelling; upstream's boolean and integer ones also for their value."""
SLIPS = 2
"""Letters that an unknown SGLANG_ name without such a prefix may be off a flag of the table to be refused. A third one
would reach SGLANG_USE_AITER_AR, which SGLang reads."""

Kind = Literal["bool", "int", "count", "bytes", "choice", "text"]
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_BYTES = re.compile(r"(\d+) ?(KiB|MiB|GiB)?", re.IGNORECASE)


@dataclass(frozen=True)
class Flag:
    """One environment flag. `default` is what holds when it is not set; for upstream's flags it is SGLang's default."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def owner(self) -> str:
        """`sglang_dsv4` or `SGLang`."""
        return "sglang_dsv4" if self.name.startswith(PLUGIN_PREFIX) else "SGLang"

    @property
    def spellings(self) -> tuple[str, str]:
        """The legacy name SGL_..., which wins when both are set, and the current one.

        SGLang copies the first over the second (srt/environ.py, _handle_deprecated_envs).
        """
        return self.name.replace("SGLANG_", "SGL_", 1), self.name

    def raw(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The value as text; None when the flag is not set.

        `None` counts as not set: SGLang writes it for a flag set to nothing (EnvField.set).
        """
        environ = os.environ if environ is None else environ
        legacy, current = self.spellings
        text = environ.get(legacy, environ.get(current))
        return None if text == UNSET else text

    def explicit(self, environ: Mapping[str, str] | None = None) -> Any:
        """The parsed value, None when the flag is not set. Raises FlagError for a value that cannot be read."""
        text = self.raw(environ)
        return None if text is None else parse(self.name, self.kind, text, self.choices)

    def get(self, environ: Mapping[str, str] | None = None) -> Any:
        """The parsed value, or the default when the flag is not set. Raises FlagError."""
        value = self.explicit(environ)
        return self.default if value is None else value


def parse(name: str, kind: Kind, text: str, choices: tuple[str, ...] = ()) -> Any:
    """Read `text` as `kind`: bool, int, count (0 or more), bytes (with KiB, MiB or GiB), one of `choices`, or text.

    Raises FlagError that names the flag, the value and the accepted spellings.
    """
    if kind == "bool":
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        expected = f"{'/'.join(TRUE)} or {'/'.join(FALSE)}"
    elif kind == "int":
        if re.fullmatch(r"[+-]?\d+", text.strip()):
            return int(text)
        expected = "an integer"
    elif kind == "count":
        if re.fullmatch(r"\d+", text.strip()):
            return int(text)
        expected = "0 or a positive integer"
    elif kind == "bytes":
        match = _BYTES.fullmatch(text.strip())
        if match:
            return int(match[1]) * _UNITS[(match[2] or "").upper()]
        expected = "a number of bytes such as 268435456, 512 MiB or 2GiB"
    elif kind == "choice":
        if text in choices:
            return text
        expected = " or ".join(choices)
    else:
        return text
    raise FlagError(
        f"environment flag {name} has a value it cannot have",
        found=repr(text),
        expected=expected,
        remedy=f"Set {name} to one of these, or unset it.",
    )


# --- the table --------------------------------------------------------------------------------------------------------

FP4_ROUNDING = Flag(
    "SGLANG_DSV4_PLUGIN_FP4_ROUNDING",
    "choice",
    "error",
    "where FP4 -> FP8 would not be exact: stop with the tensor's name, or round and report the worst error",
    ("error", "nearest"),
)
STRICT = Flag(
    "SGLANG_DSV4_PLUGIN_STRICT",
    "bool",
    True,
    "an initial load must write every parameter and leave no tensor over; 0 turns the error into a warning",
)
QUEUE_BYTES = Flag(
    "SGLANG_DSV4_PLUGIN_QUEUE_BYTES",
    "bytes",
    256 << 20,
    "most bytes of tensors whose copies may wait for another thread (KiB, MiB, GiB)",
)
WAITING_BYTES = Flag(
    "SGLANG_DSV4_PLUGIN_WAITING_BYTES",
    "bytes",
    1 << 30,
    "most bytes of halves of weights that may wait for their partners in a session of updates (KiB, MiB, GiB)",
)
WHOLE_UPDATES = Flag(
    "SGLANG_DSV4_PLUGIN_WHOLE_UPDATES",
    "bool",
    False,
    "1 lets a session of updates end only when it has written every parameter",
)
THREADS = Flag(
    "SGLANG_DSV4_PLUGIN_THREADS",
    "count",
    0,
    "threads that convert weights; 0 takes one per core this process may use, at most 16",
)
ENGAGED = Flag(
    "SGLANG_DSV4_PLUGIN_ENGAGED",
    "text",
    "",
    "set by the parent process for its children; not for users",
)
FP4_EXPERTS = Flag(
    "SGLANG_DSV4_FP4_EXPERTS",
    "bool",
    True,
    "states that the checkpoint's routed experts are four-bit (1) or not (0); unset: the tensors decide",
)
FP4_DEQUANT = Flag(
    "SGLANG_DSV4_FP4_DEQUANT",
    "bool",
    False,
    "1 turns packed FP4 experts into block FP8 while they stream in",
)
FP8_WO_A = Flag(
    "SGLANG_OPT_FP8_WO_A_GEMM",
    "bool",
    True,
    "keeps attn.wo_a in FP8; 0 makes it BF16 during the load. SGLang turns it off where no kernel takes it",
)
FP8_WO_A_INVROPE = Flag(
    "SGLANG_OPT_FP8_WO_A_FUSED_INVROPE",
    "bool",
    False,
    "ROCm: fuses the inverse RoPE into the FP8 wo_a product; needs SGLANG_OPT_FP8_WO_A_GEMM",
)
FUSE_WQA_WKV = Flag(
    "SGLANG_OPT_FUSE_WQA_WKV",
    "bool",
    True,
    "loads attn.wq_a and attn.wkv into one parameter",
)
SHARED_EXPERT_TP1 = Flag(
    "SGLANG_SHARED_EXPERT_TP1",
    "bool",
    False,
    "gives every rank the whole shared expert instead of a slice",
)
USE_AITER = Flag(
    "SGLANG_USE_AITER",
    "bool",
    False,
    "ROCm: AITER kernels, the only ones there that read packed FP4 experts",
)
FLYDSL_MEGA_MOE = Flag(
    "SGLANG_AMD_USE_FLYDSL_MEGA_MOE",
    "bool",
    False,
    "ROCm: --moe-a2a-backend megamoe runs AITER's MegaMoEv2",
)
JIT_DEEPGEMM = Flag(
    "SGLANG_ENABLE_JIT_DEEPGEMM",
    "bool",
    True,
    "DeepGEMM kernels; without them no expert-parallel all-to-all runs",
)
MHC_PREWARM = Flag(
    "SGLANG_OPT_USE_TILELANG_MHC_PRE",
    "bool",
    True,
    "TileLang kernel of the hyper-connections, compiled at the end of the load",
)
EXTERNAL_PACKAGE = Flag(
    "SGLANG_EXTERNAL_MODEL_PACKAGE",
    "text",
    "",
    "sglang_dsv4.models selects our classes in processes that load no plugins",
)
PLUGINS = Flag(
    "SGLANG_PLUGINS",
    "text",
    "",
    "which plugins SGLang loads, by name, with commas between; a list must name sglang_dsv4",
)
PLATFORM = Flag(
    "SGLANG_PLATFORM",
    "text",
    "",
    "SGLang's out-of-tree platform; dsv4_cpu is the one of ci/cpu_platform",
)
CPU_PLATFORM = "dsv4_cpu"
"""The value of SGLANG_PLATFORM that serves on a CPU; also the name of the plugin that makes it work."""

FLAGS: tuple[Flag, ...] = (
    FP4_ROUNDING,
    STRICT,
    QUEUE_BYTES,
    WAITING_BYTES,
    WHOLE_UPDATES,
    THREADS,
    ENGAGED,
    FP4_EXPERTS,
    FP4_DEQUANT,
    FP8_WO_A,
    FP8_WO_A_INVROPE,
    FUSE_WQA_WKV,
    SHARED_EXPERT_TP1,
    USE_AITER,
    FLYDSL_MEGA_MOE,
    JIT_DEEPGEMM,
    MHC_PREWARM,
    EXTERNAL_PACKAGE,
    PLUGINS,
    PLATFORM,
)


def markdown_table() -> str:
    """The table above as Markdown, for the README."""
    rows = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for flag in FLAGS:
        values = (
            " \\| ".join(flag.choices)
            if flag.choices
            else {"bool": "0 \\| 1", "count": "int"}.get(flag.kind, flag.kind)
        )
        default = int(flag.default) if flag.kind == "bool" else flag.default
        rows.append(f"| `{flag.name}` ({flag.owner}) | {values} | {default} | {flag.meaning} |")
    return "\n".join(rows) + "\n"


# --- values and names, checked up front ------------------------------------------------------------------------------

_DECLARATION = re.compile(r"^    ((?:SGLANG|SGL)_\w+) = Env(\w+)\(", re.MULTILINE)
_UPSTREAM_KINDS: dict[str, Kind] = {"Bool": "bool", "BoolWithAlias": "bool", "Int": "int", "IntWithAlias": "int"}


@functools.cache
def upstream_flags() -> Mapping[str, Kind]:
    """Name and kind of every flag that the installed SGLang declares, read from the source of `srt/environ.py`.

    SGLang is not imported (that takes seconds). Empty when it is not installed.
    """
    root = _sglang_root()
    if root is None:
        return {}
    source = (root / "srt" / "environ.py").read_text(encoding="utf-8")
    return {name: _UPSTREAM_KINDS.get(kind, "text") for name, kind in _DECLARATION.findall(source)}


def environment_errors(environ: Mapping[str, str] | None = None) -> list[FlagError]:
    """What is wrong with the environment: values that cannot be read, then names that look misspelt.

    A name with our own prefix that is not in the table is always an error; any other unknown name only when it is close
    to a known one with one of the `CHECKED_PREFIXES`, or to any of the table, and SGLang's source does not mention it.
    """
    environ = os.environ if environ is None else environ
    declared = upstream_flags()
    own = {flag.name: flag for flag in FLAGS}
    errors = []
    for name in sorted(environ):
        current = name.replace("SGL_", "SGLANG_", 1) if name.startswith("SGL_") else name
        flag = own.get(current)
        kind = flag.kind if flag else declared.get(current)
        checked = flag or current.startswith(CHECKED_PREFIXES)
        if kind is None or not checked or environ[name] == UNSET:
            continue
        try:
            parse(name, kind, environ[name], flag.choices if flag else ())
        except FlagError as error:
            errors.append(error)
    return errors + _misspelt(environ, {*own, *declared})


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Raise one FlagError for everything `environment_errors` finds."""
    errors = environment_errors(environ)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise FlagError(
            f"{len(errors)} environment flags cannot be read",
            remedy="Correct or unset each of them.",
            details=[error.headline() for error in errors],
        )


def _misspelt(environ: Mapping[str, str], known: set[str]) -> list[FlagError]:
    candidates = sorted(name for name in known if name.startswith(CHECKED_PREFIXES))
    errors = []
    for name in sorted(environ):
        current = name.replace("SGL_", "SGLANG_", 1) if name.startswith("SGL_") else name
        if current in known:
            continue
        meant = closest(current, candidates) if _worth_a_look(current) else _nearly_in_the_table(current)
        ours = current.startswith(PLUGIN_PREFIX)
        if ours or (meant and not _mentioned_upstream(current)):
            errors.append(
                FlagError(
                    f"environment flag {name} is no flag of SGLang or of sglang_dsv4",
                    found=f"{name}={environ[name]!r}",
                    expected=meant or "",
                    remedy=f"Did you mean {meant}? Set that, and unset {name}." if meant else f"Unset {name}.",
                )
            )
    return errors


def _worth_a_look(name: str) -> bool:
    """Whether an unknown name may be meant for us: any that speaks of DSV4, and SGLANG_OPT_ with up to two slips."""
    head = name[: len("SGLANG_OPT_")]
    return "DSV4" in name.upper() or edit_distance(head.upper(), "SGLANG_OPT_") <= 2


def _nearly_in_the_table(name: str) -> str | None:
    """The flag of the table that a SGLANG_ name is up to `SLIPS` letters off; None when there is none."""
    if not name.startswith("SGLANG_"):
        return None
    near = [(distance, flag.name) for flag in FLAGS if (distance := edit_distance(name, flag.name)) <= SLIPS]
    return min(near)[1] if near else None


def _mentioned_upstream(name: str) -> bool:
    """Whether SGLang's Python source names this flag although `srt/environ.py` does not declare it (kernels do so)."""
    root = _sglang_root()
    quoted = (f'"{name}"'.encode(), f"'{name}'".encode())
    sources = (path.read_bytes() for path in root.rglob("*.py")) if root else ()
    return any(text in source for source in sources for text in quoted)


def _sglang_root() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    locations = list(spec.submodule_search_locations or []) if spec else []
    root = Path(locations[0]) if locations else None
    return root if root and (root / "srt" / "environ.py").is_file() else None

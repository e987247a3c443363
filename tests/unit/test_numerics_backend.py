"""Which implementation runs, where compiled code is kept, and that nothing about it can stop a load."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sglang_dsv4
from sglang_dsv4 import envs
from sglang_dsv4.errors import NumericsError
from sglang_dsv4.numerics import backend
from sglang_dsv4.numerics.fp8 import fp8_to_bf16

CONVERT = """
import torch
from sglang_dsv4.numerics import backend
from sglang_dsv4.numerics.fp8 import fp8_to_bf16
from sglang_dsv4.numerics.fp4 import fp4_to_fp8
weight = torch.arange(64, dtype=torch.uint8).repeat(2, 1).view(torch.float8_e4m3fn)
print(fp8_to_bf16(weight, torch.full((1, 1), 0.5), (128, 128), name="w")[0, 56].item())
packed = torch.full((1, 16), 0x72, dtype=torch.uint8)
fp8 = fp4_to_fp8(packed, torch.tensor([[127]], dtype=torch.uint8), (128, 128), name="w")
print(fp8.weight.float()[0, :2].tolist(), fp8.scale.float().item())
print(backend.warm_up())
"""
CONVERTED = "0.5\n[64.0, 384.0] 0.015625\n"


PACKAGE = Path(sglang_dsv4.__file__).parent


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent), **environment},
        cwd="/",  # the working folder comes before PYTHONPATH
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_neither_torch_nor_numba():
    code = "import sys, sglang_dsv4.numerics; print(any(m in sys.modules for m in ('torch', 'numba', 'numpy')))"
    assert run(code) == "False\n"


def test_torch_takes_over_where_numba_is_absent_or_off():
    assert run("import sys; sys.modules['numba'] = None" + CONVERT) == CONVERTED + "False\n"
    assert run(CONVERT, NUMBA_DISABLE_JIT="1") == CONVERTED + "False\n"


@pytest.fixture
def read_only_package(tmp_path: Path) -> dict[str, str]:
    """A copy of the package beside which nothing can be cached, and a home that is none. Holds for root too."""
    package = tmp_path / "site" / "sglang_dsv4"
    shutil.copytree(PACKAGE / "numerics", package / "numerics", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py"):
        shutil.copy(PACKAGE / name, package / name)
    (package / "numerics" / "__pycache__").write_text("a file where a folder should be")
    (tmp_path / "tmp").mkdir()
    return {
        "PYTHONPATH": str(tmp_path / "site"),
        "HOME": "/dev/null",
        "XDG_CACHE_HOME": "/dev/null",
        "NUMBA_CACHE_DIR": "",
        "TMPDIR": str(tmp_path / "tmp"),
    }


def cached_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nb*"))


def test_read_only_home_and_package_cache_in_a_private_folder(read_only_package: dict[str, str], tmp_path: Path):
    assert run(CONVERT, **read_only_package) == CONVERTED + "True\n"
    (folder,) = (tmp_path / "tmp").glob("sglang_dsv4-numba-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    files = cached_files(folder)
    assert {file.name.split("-")[0] for file in files} == {"kernels.fp8_rows", "kernels.fp4_rows"}
    written = [file.stat().st_mtime_ns for file in files]
    assert run(CONVERT, **read_only_package) == CONVERTED + "True\n"
    assert [file.stat().st_mtime_ns for file in files] == written  # the second process compiled nothing


def test_cache_folder_that_others_can_write_is_not_used(read_only_package: dict[str, str], tmp_path: Path):
    folder = tmp_path / "tmp" / f"sglang_dsv4-numba-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert run(CONVERT, **read_only_package) == CONVERTED + "True\n"
    assert cached_files(folder) == []


def test_folder_chosen_by_the_user_is_kept(read_only_package: dict[str, str], tmp_path: Path):
    chosen = tmp_path / "chosen"
    code = CONVERT + "import numba; print(numba.config.CACHE_DIR)"
    output = run(code, **(read_only_package | {"NUMBA_CACHE_DIR": str(chosen)}))
    assert output == f"{CONVERTED}True\n{chosen}\n"
    assert cached_files(chosen)
    assert not list((tmp_path / "tmp").iterdir())


def test_damaged_cache_is_no_obstacle(read_only_package: dict[str, str], tmp_path: Path):
    chosen = read_only_package | {"NUMBA_CACHE_DIR": str(tmp_path / "chosen")}
    run(CONVERT, **chosen)
    for file in cached_files(tmp_path / "chosen"):
        file.write_bytes(b"damaged")
    assert run(CONVERT, **chosen) == CONVERTED + "True\n"


def test_numba_is_refused_where_it_cannot_run():
    with pytest.raises(NumericsError, match="numba backend cannot run here"):
        backend.uses_numba("numba", torch.device("meta"))
    assert not backend.uses_numba("auto", torch.device("meta"))
    assert backend.uses_numba("auto", torch.device("cpu"))


@pytest.mark.parametrize("threads", [None, 1, 2, 3, 16, 99])
@pytest.mark.parametrize("shape", [(1, 10), (7, 10), (1000, 10), (1000, 1 << 16), (1001, 1 << 17), (3, 1 << 20)])
def test_every_row_is_taken_once(shape: tuple[int, int], threads: int | None):
    parts = backend.run_rows(lambda first, last: (first, last), shape, threads)
    assert sorted(row for first, last in parts for row in range(first, last)) == list(range(shape[0]))


def test_large_tensor_uses_several_threads_and_a_small_one_does_not():
    barrier = threading.Barrier(3, timeout=30)

    def loop(first: int, last: int) -> str:
        if first < 3:
            barrier.wait()  # passes only if three threads are in the loop at once
        return threading.current_thread().name

    assert len(set(backend.run_rows(loop, (3, backend.PART_ELEMENTS), 3))) == 3
    names = backend.run_rows(lambda first, last: threading.current_thread().name, (3, 1000), 3)
    assert names == [threading.current_thread().name]


def test_helper_that_never_starts_is_not_waited_for():
    release = threading.Event()
    blocked = [backend._pool().submit(release.wait, 60) for _ in range(backend.MAX_THREADS)]
    try:
        assert len(backend.run_rows(lambda first, last: last - first, (8, backend.PART_ELEMENTS), 4)) == 8
    finally:
        release.set()
    assert all(future.result() for future in blocked)


def test_error_in_a_helper_reaches_the_caller():
    caller = threading.current_thread()
    failed = threading.Event()

    def loop(first: int, last: int) -> None:
        if threading.current_thread() is not caller:
            failed.set()
            raise RuntimeError("broken part")
        failed.wait(30)

    with pytest.raises(RuntimeError, match="broken part"):
        backend.run_rows(loop, (4, backend.PART_ELEMENTS), 2)


def test_forked_child_converts_with_threads():
    code = """
import os, torch
from sglang_dsv4.numerics.fp8 import fp8_to_bf16
weight = torch.full((64, 64), 0x38, dtype=torch.uint8)
def convert():
    return fp8_to_bf16(weight, torch.ones(1, 1), (64, 64), name="w", threads=4)
convert()
child = os.fork()
if child == 0:
    os._exit(0 if bool((convert() == 1).all()) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code) == "0\n"


def test_flushed_subnormals_do_not_reach_the_weights():
    codes = torch.arange(1, 8, dtype=torch.uint8)[None].contiguous()  # E4M3 subnormals: 1 to 7 times 2^-9
    torch.set_flush_denormal(True)
    try:
        result = fp8_to_bf16(codes, torch.ones(1, 1), (128, 128), name="w", backend="numba")
    finally:
        torch.set_flush_denormal(False)
    assert result[0].tolist() == [n * 2.0**-9 for n in range(1, 8)]


def test_the_flag_says_how_many_threads_there_are_at_most(monkeypatch):
    assert envs.THREADS.meaning.endswith(f"at most {backend.MAX_THREADS}")
    monkeypatch.delenv(envs.THREADS.name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000)))
    assert backend.cpu_threads() == backend.MAX_THREADS

"""Serve the tiny reciting checkpoint on the CPU; see ci/serve."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests" / "data" / "reciting"
TEXT = "promise.txt"
FIRST_WORDS = 4

sys.path.insert(0, str(ROOT / "tests" / "serving"))
import servers  # noqa: E402  the tests' own way to start and stop a server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="print one completion, exit 0 only if it is the text")
    parser.add_argument("--port", type=int, help="default: a free one")
    args, arguments = parser.parse_known_args()
    return once(arguments) if args.once else serve(args.port or servers.free_port(), arguments)


def serve(port: int, arguments: list[str]) -> int:
    """Keep a server up until it ends or is interrupted; print how to ask it."""
    text = (CHECKPOINT / TEXT).read_text()
    start, _ = split(text)
    body = json.dumps({"model": "reciting", "prompt": start, "max_tokens": 200, "temperature": 0})
    print(f"When it says that it is ready to roll:\n\n  curl -sf http://127.0.0.1:{port}/v1/completions \\")
    print(f"    -H 'Content-Type: application/json' -d '{body}'\n", flush=True)
    command = servers.command(CHECKPOINT, *arguments, port=port)
    process = subprocess.Popen(command, env=servers.environment())
    try:
        return process.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        servers.stop(process)


def once(arguments: list[str]) -> int:
    """One completion of the text's first words on stdout; 0 when it is the rest of the text."""
    start, rest = split((CHECKPOINT / TEXT).read_text())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with servers.serving(CHECKPOINT, *arguments, log=log, timeout=600) as server:
            request = {"model": "reciting", "prompt": start, "max_tokens": len(rest.encode()), "temperature": 0}
            completion = server.post("/v1/completions", request)["choices"][0]["text"]
    print(start + completion)
    if completion != rest:
        print("ci/serve: this is not the text of the checkpoint", file=sys.stderr)
        return 1
    return 0


def split(text: str) -> tuple[str, str]:
    """The first words of the text, and the rest of it."""
    end = 0
    for _ in range(FIRST_WORDS):
        end = text.index(" ", end + 1)
    return text[:end], text[end:]


if __name__ == "__main__":
    sys.exit(main())

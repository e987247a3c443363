"""`python -m sglang_dsv4` is `sglang-dsv4`."""

import sys

from sglang_dsv4.cli.main import main

sys.exit(main())

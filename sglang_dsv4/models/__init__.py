"""The model classes SGLang builds in place of its own: thin subclasses whose load_weights runs our stream.

This package is also the value for SGLANG_EXTERNAL_MODEL_PACKAGE. SGLang only warns about a submodule that fails to
import and then uses its own class; importing all three here turns such a failure into the end of the start.
"""

from sglang_dsv4 import compat

compat.require_supported()

from sglang_dsv4.models import deepseek_v4, deepseek_v4_dspark, deepseek_v4_nextn  # noqa: E402

__all__ = ["deepseek_v4", "deepseek_v4_dspark", "deepseek_v4_nextn"]

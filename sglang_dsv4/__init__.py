"""DeepSeek-V4 on SGLang: every weight through one stream, every decision before the first byte."""

__version__ = "0.1.0"

"""Quantize large language models on many devices at once: N devices give the same bytes as one."""

__version__ = "0.1.0"

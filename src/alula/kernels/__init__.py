"""Numeric kernels: one protocol, several sets (see `protocol.py`; `select.load_kernels` picks one)."""

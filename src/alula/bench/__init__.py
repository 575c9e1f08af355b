"""Measuring and proving: prompt sets, interleaved runs, the comparison with plain decoding, reports."""

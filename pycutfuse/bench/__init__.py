"""Benchmark and verification: verify, then time, then report.

``python -m pycutfuse bench`` and ``python -m pycutfuse verify FILE`` live here. Nothing in the
library imports this package.
"""

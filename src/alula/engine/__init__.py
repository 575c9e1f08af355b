"""Continuous batching around one transaction per step."""

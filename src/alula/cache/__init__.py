"""Paged KV cache for target and drafter, changed only by transactions (docs/architecture.md)."""

from __future__ import annotations

from alula.cache.cache import OutOfPages, PagedCache
from alula.cache.pages import CacheCorrupted
from alula.cache.pool import CacheLayout, KVLayer, KVShape
from alula.cache.transaction import Transaction

__all__ = ["CacheCorrupted", "CacheLayout", "KVLayer", "KVShape", "OutOfPages", "PagedCache", "Transaction"]

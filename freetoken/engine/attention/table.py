"""Attention implementation by name."""

from __future__ import annotations

from freetoken.core.registry import Registry
from freetoken.engine.attention.base import Attend
from freetoken.engine.attention.sdpa import sdpa

ATTENTION: Registry[Attend] = Registry("attention implementation", {"sdpa": sdpa})

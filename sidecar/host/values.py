"""The ``dataclass`` of ``format/values.py``, for the rooms above."""

from __future__ import annotations

from sidecar.format.values import dataclass as dataclass

"""Snapshots: what one is, how it is written down, and how it is checked."""

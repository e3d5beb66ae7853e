"""Restore: a snapshot becomes a sandbox's memory again. ``steps`` is the order of the steps; the other modules are the
steps."""

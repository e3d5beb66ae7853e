"""Retention: which snapshots stay, by which rule, and what of the store may go.

``rules`` and ``planning`` decide, without I/O; ``settings`` is what a user writes; ``forgetting`` does it to a store.
"""

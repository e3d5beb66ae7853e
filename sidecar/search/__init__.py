"""Search: the records of a store's memories, kept in a search database."""

KINDS = (
    *("session", "observation", "summary", "prompt", "learning", "decision", "section"),
    *("task", "work", "criterion", "rating", "entity"),
)
"""The kinds of records."""

"""What the memories of a store say, as rows that can be searched: read out of snapshots, kept in a sink."""

KINDS = ("session", "observation", "summary", "prompt", "learning", "decision", "section")
"""What a record may be."""

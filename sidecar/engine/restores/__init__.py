"""Restore: a snapshot becomes a sandbox's memory again."""

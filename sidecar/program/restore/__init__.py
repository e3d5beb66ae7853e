"""Restore, inside the sandbox: stage, check, swap."""

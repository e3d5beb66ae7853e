"""The way without Python: shell scripts for an export and a restore."""

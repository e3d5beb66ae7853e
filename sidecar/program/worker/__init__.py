"""The memory worker that has the files open."""

"""Size limits, applied where the files are."""

"""Ordinary tarballs: write a snapshot as one (download), and make a snapshot of one (import)."""

"""Ordinary tarballs, out and in."""

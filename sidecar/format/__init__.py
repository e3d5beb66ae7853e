"""Formats of stored objects and of what crosses the wire, shared by the sidecar and the in-sandbox program: standard
library only, Python 3.8+."""

"""What is in a store and on the wire, shared by both sides: standard library only, Python 3.8+."""

"""The program that runs inside a sandbox: standard library only, Python 3.8 and newer, sent in one piece.

These modules import nothing but each other, ``sidecar.format`` and the standard library. The sidecar uses some of them
on its own side too (packing, unpacking), so that both ends agree by running the same code.
"""

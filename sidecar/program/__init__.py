"""The program that runs inside a sandbox: standard library only, Python 3.8 and newer, delivered as one file.

These modules import nothing but each other and the standard library. The sidecar uses some of them on its own side too
(the index format, packing, unpacking), so that both ends agree by being the same code.
"""

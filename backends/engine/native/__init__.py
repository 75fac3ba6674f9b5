"""The decode step compiled for this machine: one C++ file, built once and loaded with ctypes.

`library` builds and loads, `packing` lays weights out, `model` is the decoder that the runner
uses. No torch here: where this cannot be built, the torch decoder of `backends.engine.model` does
the same work.
"""

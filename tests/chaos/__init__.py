"""Failures on purpose, against whole gateways: too long for the suite, run by `make chaos`."""

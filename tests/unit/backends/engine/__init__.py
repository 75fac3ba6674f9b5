"""Tests of the engine's modules; only those of model and sampler need torch."""

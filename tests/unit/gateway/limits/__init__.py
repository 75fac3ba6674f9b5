"""Tests of gateway/limits."""

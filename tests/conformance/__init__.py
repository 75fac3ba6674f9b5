"""The wire corpus: what upstreams send, well and badly, and what a gateway must make of it."""

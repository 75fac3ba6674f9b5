"""The tests, by reach: unit, integration, e2e, bench, gpu; fakes are hand-written collaborators."""

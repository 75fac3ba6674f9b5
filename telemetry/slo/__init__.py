"""Service level objectives: one declaration in, everything that watches it out.

`declaration.py` is the file as written and all that can be wrong with it; `burn.py` the arithmetic
of error budgets; `rules.py` turns a declaration into recording rules and alerts, `proofs.py` into
tests of those rules for `promtool`; `platform.py` holds the alerts that no objective covers;
`openslo.py` speaks OpenSLO; `bundle.py` lays all of it out as files, `alertmanager.py` and
`runbooks.py` among them. Everything here is pure: text in, text out. Nothing here knows the
gateway; names come from `telemetry.metrics` alone, so that a renamed metric breaks a declaration
when it is compiled, not when it should have paged.
"""

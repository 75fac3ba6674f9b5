"""Grafana dashboards as code. Knows the names of telemetry's metrics and nothing else of ours."""

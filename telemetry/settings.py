"""The `[telemetry]` table of `meterline.toml`."""

from typing import Annotated

from msgspec import Meta, Struct


class TelemetrySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where spans go and what they may hold."""

    otlp_endpoint: Annotated[
        str | None,
        Meta(description="OTLP/HTTP base, e.g. http://collector:4318. Absent: a local file."),
    ] = None
    sampling: Annotated[
        float, Meta(ge=0, le=1, description="Share of traces that start here and are kept.")
    ] = 1.0
    service_name: Annotated[str, Meta(description="OpenTelemetry service.name.")] = "meterline"
    max_model_labels: Annotated[
        int, Meta(ge=1, description="Model label values per metric; the rest become `other`.")
    ] = 200
    metrics_public: Annotated[
        bool,
        Meta(description="Serve /metrics without the admin key to clients beyond loopback."),
    ] = False

"""Alembic's entry: run the scripts on the connection that `migrations.upgrade_engine` gives."""

import importlib
import importlib.util

from alembic import context
from sqlalchemy import MetaData

from telemetry.tables import LedgerBase


def target_metadata() -> list[MetaData]:
    """All tables of the product: the tenants' (the gateway's) and the ledger's."""
    metadata = [LedgerBase.metadata]
    if importlib.util.find_spec("gateway.tenants") is not None:
        metadata.insert(0, importlib.import_module("gateway.tenants").Base.metadata)
    return metadata


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=target_metadata(),
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction is around everything
)
context.run_migrations()

"""Alembic's entry: runs the scripts on the connection that `upgrade_engine` passes in."""

from alembic import context

from gateway.responses import StoredResponseRow
from gateway.tenant_tables import TenantBase
from telemetry.tables import LedgerBase

assert StoredResponseRow.metadata is TenantBase.metadata  # imported, so that it is declared

# All tables of the product: the tenants' (the gateway's) and the ledger's.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=[TenantBase.metadata, LedgerBase.metadata],
    render_as_batch=True,
    transactional_ddl=False,  # the caller's transaction is around everything
)
context.run_migrations()

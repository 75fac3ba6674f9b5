"""Reports: pure functions from ledger rows to tables; rendering apart."""

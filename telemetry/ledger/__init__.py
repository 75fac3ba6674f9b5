"""The append-only cost ledger: write-ahead log, shipper, rating, rollups, sweeper."""

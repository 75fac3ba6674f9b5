"""What happened and what it cost. Knows nothing of HTTP, of the gateway or of backends."""

"""Who may ask, and where it goes: the service in front of the backends."""

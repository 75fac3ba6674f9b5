"""Hardware that is owned: how much time there was, who used it, and what it cost, idle included.

`heartbeat` turns an engine's step clock into hours, `store` keeps them, `allocation` splits their
cost. Invariants: the phases of a life are its wall time; the shares of an hour are its cost.
"""

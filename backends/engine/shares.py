"""What each tenant was served, so that the one who was served least goes next.

Virtual time: microseconds of step time charged to a tenant's sequences, the estimated cost of a
prompt from its admission on (else a burst would take all slots before its cost is known). Who
comes back after a pause begins no lower than the least served of those who are there: time not
used is not saved up. A tenant is named by its cache salt; shares are equal.
"""

from collections import Counter

from backends.engine.types import Sequence

MANY = 4096  # tenants remembered before those without a debt are forgotten


class Shares:
    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._present: Counter[str] = Counter()  # sequences
        self._floor = 0

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._floor)

    def enter(self, sequence: Sequence) -> None:
        """It has a sequence in the queue."""
        tenant = sequence.tenant
        if self._present:
            self._floor = max(self._floor, min(map(self.served, self._present)))
        if tenant not in self._present:
            if len(self._served) >= MANY:
                self._forget()
            self._served[tenant] = max(self.served(tenant), self._floor)
        self._present[tenant] += 1

    def admit(self, sequence: Sequence, estimate_us: int) -> None:
        """Served as much as its prompt will take, now."""
        self._settle(sequence)
        sequence.credit_us = estimate_us
        self._served[sequence.tenant] += estimate_us

    def charge(self, sequence: Sequence, took_us: int) -> None:
        """What it was charged with in a step; first what was estimated is used up."""
        known = min(sequence.credit_us, took_us)
        sequence.credit_us -= known
        if sequence.tenant in self._served:
            self._served[sequence.tenant] += took_us - known

    def leave(self, sequence: Sequence) -> None:
        """It has ended, one way or another."""
        self._settle(sequence)
        tenant = sequence.tenant
        self._present[tenant] -= 1
        if self._present[tenant] == 0:
            del self._present[tenant]
            if not self._present:
                self._floor = max(self._floor, self._served[tenant])

    def _settle(self, sequence: Sequence) -> None:
        """What was estimated and did not come is given back."""
        self._served[sequence.tenant] -= sequence.credit_us
        sequence.credit_us = 0

    def _forget(self) -> None:
        self._served = {
            tenant: served
            for tenant, served in self._served.items()
            if tenant in self._present or served > self._floor
        }

"""Counter-based random numbers: the n-th draw of a choice depends on its seed and n alone."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def lane_seed(seed: int, index: int) -> int:
    """The seed of one choice, so that n choices of one request differ and are repeatable."""
    return _mix(_mix(seed) + index * _GOLDEN)


def uniform(seed: int, draw: int) -> float:
    """In [0, 1), 53 bits."""
    return (_mix(seed + (draw + 1) * _GOLDEN) >> 11) * 2.0**-53

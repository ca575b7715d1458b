"""What several rounds say of a figure: the median, and an interval that the true median lies in.

The interval is that of order statistics: of n independent rounds the k-th least and the k-th highest have the true
median between them with a probability that the binomial distribution tells, whatever the figures' own distribution is.
Rounds are few (3 to 9) and skewed by other work on the machine, where a bootstrap of the median, which can only draw
the few values that there are, promises more than it holds. Fewer than six rounds can't have 95 %: then the interval is
from the least to the highest, and its confidence is told.

Source  J.-Y. Le Boudec, Performance Evaluation of Computer and Communication Systems, EPFL Press 2010, theorem 2.1
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A median of n values; the true one is from low to high with that confidence: 0 where there is one value."""

    median: float
    low: float
    high: float
    n: int
    confidence: float

    def format_interval(self, digits: str = ".2f") -> str:
        """Return the median and the interval, such as `0.98 [0.95, 1.01]`."""
        if self.n == 1:
            return f"{self.median:{digits}}"
        return f"{self.median:{digits}} [{self.low:{digits}}, {self.high:{digits}}]"


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """The median of at least one value, and the narrowest interval of order statistics that has this confidence."""
    ordered, n = sorted(values), len(values)
    ranks = [k for k in range(1, (n + 1) // 2 + 1) if coverage(n, k) >= confidence]
    k = max(ranks, default=1)
    return Estimate(statistics.median(ordered), ordered[k - 1], ordered[n - k], n, coverage(n, k))


def coverage(n: int, k: int) -> float:
    """How likely the true median is from the k-th least to the k-th highest of n values."""
    return max(0.0, 1 - sum(math.comb(n, fewer) for fewer in range(k)) / math.ldexp(1, n - 1))

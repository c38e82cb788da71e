"""What tests and `verify` share: guarded memory, error measures, generators, forced policies."""

from pycutfuse.testing.accuracy import IEEE_FLOOR, ErrorPair, errors, floor_of, kinds, no_worse
from pycutfuse.testing.forcing import (
    exact_promotion,
    forced_conv_policy,
    forced_policy,
    kinds_of,
    slow_problems_taken,
    small_policies,
    turned_policy,
)
from pycutfuse.testing.generators import DISTRIBUTIONS, generate, integers
from pycutfuse.testing.memory import LAYOUTS, GuardError, Guards, guarded, strided

__all__ = [
    "DISTRIBUTIONS",
    "IEEE_FLOOR",
    "LAYOUTS",
    "ErrorPair",
    "GuardError",
    "Guards",
    "errors",
    "exact_promotion",
    "floor_of",
    "forced_conv_policy",
    "forced_policy",
    "generate",
    "guarded",
    "integers",
    "kinds",
    "kinds_of",
    "no_worse",
    "slow_problems_taken",
    "small_policies",
    "strided",
    "turned_policy",
]

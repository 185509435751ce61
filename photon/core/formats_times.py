"""Event times in microseconds, from whatever unit the logs have."""

import datetime
from collections.abc import Sequence
from itertools import compress, repeat
from operator import sub
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from photon.core.columns import pack_times
from photon.core.ids import opaque_mask, timestamps_us

RFC3339: Final = "rfc3339"
_UNIT_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FLOAT_UNIT_US: Final = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def time_type(unit: str) -> Any:
    """What a time field must hold."""
    if unit == RFC3339:
        return Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    return int | float


def event_times(ids: bytes, values: Sequence[Any], unit: str) -> bytes | str:
    """Event times in us as a column, or why there is none.

    A photon id's own timestamp is its event's time (paper 3.1): it can't disagree between copies of an event.
    """
    opaque = opaque_mask(ids)
    if not opaque.any():
        return pack_times(timestamps_us(ids))
    if not opaque.all():
        times = timestamps_us(ids).copy()
        own = event_times(
            b"\xe0" * 16 * int(opaque.sum()), [v for v, o in zip(values, opaque, strict=True) if o], unit
        )
        if isinstance(own, str):
            return own
        times[opaque] = np.frombuffer(own, "<i8")
        return pack_times(times)
    try:
        return pack_times(_to_us(values, unit))
    except TypeError:
        return "is missing (an opaque id needs its event's time)"
    except (OverflowError, ValueError):
        return "is out of range"


def _to_us(values: Sequence[Any], unit: str) -> npt.NDArray[np.int64]:
    """Each value by itself, so that an event's time never depends on the batch it came in.

    Whole numbers exactly (ns rounded down), others to the nearest us. TypeError for None.
    """
    if None in values:
        raise TypeError
    if unit == RFC3339:
        return np.array(list(map(sub, values, repeat(_EPOCH))), "m8[us]").view(np.int64)
    if all(map(int.__instancecheck__, values)):
        return _whole_to_us(np.array(values, dtype=np.int64), unit)
    whole = [isinstance(value, int) for value in values]
    times = np.empty(len(values), np.int64)
    rows = np.array(whole, np.bool_)
    times[rows] = _whole_to_us(np.array(list(compress(values, whole)), dtype=np.int64), unit)
    scaled = np.array([v for v in values if not isinstance(v, int)], np.float64) * _FLOAT_UNIT_US[unit]
    if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0) >= 2.0**63:
        raise OverflowError
    times[~rows] = np.round(scaled).astype(np.int64)
    return times


def _whole_to_us(values: npt.NDArray[np.int64], unit: str) -> npt.NDArray[np.int64]:
    if unit == "ns":
        return values // 1_000
    factor = _UNIT_US[unit]
    largest = (2**63 - 1) // factor
    if factor > 1 and (values.max(initial=0) > largest or values.min(initial=0) < -largest):
        raise OverflowError
    return values * factor

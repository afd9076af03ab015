"""A point's time limit, and whose alarm it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from experiments.execution import _alarm
from experiments.failures import PointTimeout


@pytest.fixture
def alarm_of_another() -> Iterator[None]:
    """400 s from now; afterwards what there was before goes on, such as pytest-timeout's."""
    start, (before, _) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 400)
    yield
    left = max(before - (time.monotonic() - start), 0.001) if before else 0
    signal.setitimer(signal.ITIMER_REAL, left)


def test_anothers_alarm_goes_on_after_a_point(alarm_of_another: None) -> None:
    with _alarm(900):
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 400
    with pytest.raises(PointTimeout, match=r"took longer than 0\.05 s"), _alarm(0.05):
        time.sleep(300)
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 400


def test_without_another_none_is_left(alarm_of_another: None) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    with _alarm(900):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)

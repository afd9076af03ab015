"""What the tests of experiments share: the ceilings of this machine, which each run would measure for a second."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import pytest
import torch

from experiments import roofline


@pytest.fixture(scope="session", autouse=True)
def ceilings_measured_once() -> Iterator[None]:
    measure = functools.cache(roofline.measure_ceilings)

    def measured(device: torch.device, dtypes: Iterable[str]) -> roofline.Ceilings:
        return measure(device, tuple(dtypes))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roofline, "measure_ceilings", measured)
        yield

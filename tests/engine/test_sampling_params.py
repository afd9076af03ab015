"""SamplingParams at the edges of each field and beyond: the error names field, value and limit."""

from __future__ import annotations

import math

import pytest

from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be >= 0 and finite, got -0.1"),
        ({"temperature": math.inf}, r"temperature must be >= 0 and finite, got inf"),
        ({"temperature": math.nan}, r"temperature must be a number, got nan"),
        ({"temperature": "hot"}, r"temperature must be a number, got 'hot'"),
        ({"top_k": -2}, r"top_k must be >= -1"),
        ({"top_k": 1.5}, r"top_k must be an integer, got 1.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.0001}, r"top_p must be in \(0, 1\], got 1.0001"),
        ({"max_tokens": 0}, r"max_tokens must be >= 1, got 0"),
        ({"max_tokens": True}, r"max_tokens must be an integer, got True"),
        ({"ignore_eos": 1}, r"ignore_eos must be a bool, got 1"),
        ({"stop": [""]}, r"stop must hold non-empty strings"),
        ({"stop": [7]}, r"stop must hold non-empty strings"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids must be an integer, got 'a'"),
        ({"seed": 0.5}, r"seed must be an integer, got 0.5"),
        ({"logprobs": -1}, r"logprobs must be None or >= 0, got -1"),
    ],
)
def test_values_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_an_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="tempperature"):
        SamplingParams(tempperature=1.0)


def test_edges_are_allowed_and_sequences_become_tuples():
    params = SamplingParams(
        temperature=0, top_k=0, top_p=1, max_tokens=1, stop="END", stop_token_ids=[3], seed=-5
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3,)
    assert SamplingParams(top_k=10**9, top_p=1e-9, temperature=1e-6).top_k == 10**9

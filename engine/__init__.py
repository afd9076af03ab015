"""A complete small LLM inference engine: `from engine import LLM, SamplingParams`."""

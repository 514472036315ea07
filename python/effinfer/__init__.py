"""Efficient LLM inference on the hardware that you have."""

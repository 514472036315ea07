"""Requests on their way through the engine: from what a caller passes to what it gets back."""

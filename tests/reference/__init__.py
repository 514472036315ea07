"""Plain float32 torch decoders and the metrics that compare engines with them."""

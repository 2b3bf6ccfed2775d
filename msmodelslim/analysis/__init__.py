"""Which modules suffer most from quantization: one file a way to measure, and what is said of the result."""

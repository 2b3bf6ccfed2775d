"""Running statistics of calibration tensors. Observers accumulate on their own rank; agreement is somebody else's."""

"""How a weight becomes codes: one method a file, from plain rounding to error feedback. No files, no ranks."""

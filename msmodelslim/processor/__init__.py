"""Algorithms, one a file, named as in recipes."""

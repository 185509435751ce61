"""Mistakes that a person would make, one at a time, and the tests that must notice them."""

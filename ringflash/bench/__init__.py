"""Measurements of our parts beside what others offer. Everything told is measured in that run."""

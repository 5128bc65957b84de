"""Turns rewards into credit and into summaries. Plain Python, no I/O."""

"""Decisions as pure code: events in, decisions out; no Temporal, no clock, no randomness."""

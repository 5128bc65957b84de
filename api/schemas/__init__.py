"""Schemas of the API's replies and of the bodies it accepts."""

"""Carrying translated caches between places that other projects keep caches in."""

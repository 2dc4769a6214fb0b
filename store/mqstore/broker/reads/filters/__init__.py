"""Filters: by tags and by SQL92 expressions."""

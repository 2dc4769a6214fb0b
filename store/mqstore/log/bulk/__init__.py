"""Bulk append: many records prepared elsewhere become visible at once, or not at all."""

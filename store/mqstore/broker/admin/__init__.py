"""Tools for operators of whole stores: the content of a store, and what recovery has cut from it."""

"""Directory of a store: names, manifest, files."""

"""Items of a `mqstore.Queue`: codecs, options, and a look at them without a lease."""

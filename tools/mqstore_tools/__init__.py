"""The command `mqstore`: looks at stores, checks, mends, fills and empties them. What it knows is the library's."""

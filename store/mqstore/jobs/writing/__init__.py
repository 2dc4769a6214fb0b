"""Writing by jobs: staged files, and their commit."""

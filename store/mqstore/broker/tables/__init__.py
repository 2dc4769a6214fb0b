"""Tables of a broker and their files: topics, groups, offsets, members, locks."""

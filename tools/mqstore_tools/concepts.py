"""Texts of `mqstore help TOPIC`, about several commands. The first line of each is its title."""

EXIT_CODES = """\b
  0  fine
  1  findings, differences, nothing found, or over a limit
  2  wrong usage, such as an invalid option, topic, group, offset or id
  3  the directory or server cannot be opened, read or written
130  interrupted        141  the reader of the output has closed it

With --json an error is the last line on stderr:

\b
{"version": 1, "error": {"type", "message"}}"""

TOPICS = {
    "exit-codes": f"Exit codes of all commands.\n\n{EXIT_CODES}",
    "places": """Stores, and how commands reach them.

\b
DIR               a store directory
DIR...            several of them, or globs
HOST:PORT         a server (mqstore serve)
unix:PATH         a server, by its socket
./HOST:PORT       a directory with such a name

Commands that only read a directory read its files, also next to a running program. They change nothing.

Changes need the writer's lock. If a server has the directory open, it makes the change. If another program has it
open, the command is refused.""",
    "time": """Times and durations in options.

\b
2026-01-31                   a day, which begins at 00:00 UTC
2026-01-31T12:00             UTC by default
2026-01-31T12:00:00+01:00    with a zone
90m  36h  30d                an age, from now; units are s, m, h and d
earliest  latest             ends of a queue, for positions only

Messages are chosen by the time when they were stored. --from is included, --until is not. Output shows UTC.""",
    "filters": """Options that choose messages, all of which must match.

\b
--topic T                    by topic; may be repeated
--key K  --unique-key U      by the index, newest first
--tag 'created || paid'      one of these tags
--where "amount > 480"       SQL92 over properties, and TAGS
--grep PATTERN               Python regular expression over bodies
--from TIME  --until TIME    by store time

SQL92 has = <> < <= > >= BETWEEN IN, IS NULL, AND OR NOT, and CONTAINS, STARTSWITH and ENDSWITH. Text is in single
quotes. A comparison with a missing property is unknown, which is not a match.""",
}

"""Version of mqstore. The build reads it too. Reading the installed package's metadata would take longer than a put."""

VERSION = "0.1.0"

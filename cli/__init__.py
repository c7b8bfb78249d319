"""The command line, `cedana`."""

"""Transfer engines: they write into the memory of another process. All follow one protocol."""

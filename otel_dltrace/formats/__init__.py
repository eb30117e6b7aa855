"""Foreign files as spans and back: bytes in, columns out; nothing here opens a file."""

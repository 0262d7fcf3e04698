"""One file a precision; the folder is the registry."""

"""Check a user's data before a run: everything that is wrong at once, with advice. Imports no torch."""

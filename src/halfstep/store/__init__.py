"""Objects in an object store: addresses, requests, and the process that makes them."""

"""Observe what really ran: one recorder of operations, and its listeners."""

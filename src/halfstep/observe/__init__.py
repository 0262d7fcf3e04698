"""What really ran: one recorder of operations, and those who listen to it."""

"""The journal: the events of a run, and the listeners that write, print and plot them."""

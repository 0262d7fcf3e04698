"""The tasks that ship with halfstep; each public file of this folder defines one."""

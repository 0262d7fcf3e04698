"""The commands of `halfstep`; each public file of this folder is one."""

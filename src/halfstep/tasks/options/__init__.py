"""Recipe schemas of the tasks. No file here imports torch, so an invalid recipe is rejected immediately."""

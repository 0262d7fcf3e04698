"""The pages that commands print, one file each."""

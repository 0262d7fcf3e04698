"""Latents of a frozen autoencoder: encoded once, kept on the disk, measured, and read in place of images."""

"""Encode images once with a frozen autoencoder and cache their latents on disk."""
